"""What users install: the wheel, built from the sdist, runs in a folder without the sources."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TEST = "tests/distributed/test_reduce_scatter.py"


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist and the wheel that was built from it."""
    out = tmp_path_factory.mktemp("dist")
    # Without --sdist or --wheel, `build` makes the wheel from the sdist it has just made.
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(ROOT)]
    subprocess.run(command, check=True, timeout=120, capture_output=True)
    return out


def test_sdist_holds_what_a_builder_needs(dist: Path) -> None:
    (sdist,) = dist.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.split("/", 1)[1] for name in archive.getnames() if "/" in name}
    wanted = {"pyproject.toml", "LICENSE", "README.md", "scripts/test", TEST}
    assert wanted <= names, wanted - names
    assert not any(name.startswith((".venv", "runs", "data")) for name in names)


def test_wheel_holds_the_two_packages_and_nothing_else(dist: Path) -> None:
    (wheel,) = dist.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    assert {"loco_fsdp/py.typed", "loco_fsdp_kernels/py.typed"} <= set(names)
    tops = {name.split("/")[0] for name in names if ".dist-info/" not in name}
    assert tops == {"loco_fsdp", "loco_fsdp_kernels"}


def test_installed_wheel_passes_a_test(dist: Path, tmp_path: Path) -> None:
    (wheel,) = dist.glob("*.whl")
    site = tmp_path / "site"
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"]
    subprocess.run([*pip, "--target", str(site), str(wheel)], check=True, timeout=120)
    for name in ("conftest.py", "rank_pool.py"):
        shutil.copy(ROOT / "tests" / name, tmp_path)
    shutil.copy(ROOT / TEST, tmp_path)
    (tmp_path / "test_origin.py").write_text(
        "import loco_fsdp\n"
        f"def test_origin() -> None:\n    assert loco_fsdp.__file__.startswith({str(site)!r})\n"
    )
    # PYTHONPATH comes before the editable install of the sources.
    environment = os.environ | {"PYTHONPATH": f"{site}{os.pathsep}{tmp_path}"}
    choice = "test_origin or (test_equals_definition and 2-torch.bfloat16-block8)"
    pytest_command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", choice]
    done = subprocess.run(
        pytest_command,
        check=False,
        cwd=tmp_path,
        env=environment,
        timeout=120,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 passed" in done.stdout, done.stdout
