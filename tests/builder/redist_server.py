"""A server with the layout of NVIDIA's archives, made of small real parts: scripts, headers, links."""

import contextlib
import hashlib
import io
import json
import tarfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote

NVCC = """#!/bin/sh
if [ "$1" = -V ]; then echo "release 12.8, V12.8.93"; exit 0; fi
for output; do :; done
echo "/* an empty linker script */" > "$output"
"""
PARTS: dict[str, dict[str, str]] = {
    "cuda_nvcc": {
        "bin/nvcc": NVCC,
        "bin/nvcc.profile": "TOP = /usr/local/cuda",
        "nvvm/bin/cicc": "#!/bin/sh\n",
        "include/crt/host_config.h": "#if __GNUC__ > 14\n",
        "LICENSE": "NVIDIA's terms",
    },
    "cuda_cudart": {
        "include/cuda_runtime.h": "",
        "include/cuda.h": "CUresult cuInit(unsigned);",
        "lib/libcudart.so.12": "/* an empty linker script */",
        "lib/libcudart.so": "-> libcudart.so.12",
    },
    "cuda_cccl": {"include/cuda/std/version": ""},
    "cuda_profiler_api": {"include/cuda_profiler_api.h": ""},
}
"""Component -> its files; "-> x" is a link."""


def tar(name: str, files: dict[str, str]) -> bytes:
    """An archive with one top folder, as NVIDIA's are."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:xz", preset=0) as archive:
        for path, text in files.items():
            member = tarfile.TarInfo(f"{name}-archive/{path}")
            member.mode = 0o755 if text.startswith("#!") else 0o644
            if text.startswith("-> "):
                member.type, member.linkname = tarfile.SYMTYPE, text[3:]
                archive.addfile(member)
            else:
                member.size = len(text.encode())
                archive.addfile(member, io.BytesIO(text.encode()))
    return out.getvalue()


def release(label: str = "12.8.1", parts: dict[str, dict[str, str]] = PARTS) -> dict[str, bytes]:
    """The files of a release: its manifest and its archives, by path."""
    return published(label, {name: tar(name, content) for name, content in parts.items()})


def published(label: str, archives: dict[str, bytes]) -> dict[str, bytes]:
    """The same for archives that are made already."""
    files: dict[str, bytes] = {}
    manifest: dict[str, Any] = {"release_date": "2025-03-05", "release_label": label, "release_product": "cuda"}
    for name, content in archives.items():
        path = f"{name}/linux-x86_64/{name}-linux-x86_64-12.8.93-archive.tar.xz"
        files[path] = content
        described = {
            "relative_path": path,
            "sha256": hashlib.sha256(files[path]).hexdigest(),
            "size": str(len(files[path])),
        }
        manifest[name] = {"name": name, "license": "CUDA Toolkit", "version": "12.8.93", "linux-x86_64": described}
    files[f"redistrib_{label}.json"] = json.dumps(manifest).encode()
    return files


@dataclass
class Server:
    """What is served, and what was asked for.

    ``drips`` sends byte by byte. ``breaks`` ends that many answers after half of their bytes; while it ``stalls``, half of an
    archive comes, and then nothing.
    """

    address: str
    files: dict[str, bytes]
    asked: list[tuple[str, str]] = field(default_factory=list)
    breaks: int = 0
    ranges: bool = True
    redirect: str = ""
    stalls: bool = False
    drips: bool = False
    stalled: threading.Event = field(default_factory=threading.Event)

    def described(self, label: str = "12.8.1") -> dict[str, Any]:
        """A release's manifest."""
        document: dict[str, Any] = json.loads(self.files[f"redistrib_{label}.json"])
        return document

    def describe(self, manifest: dict[str, Any], label: str = "12.8.1") -> None:
        """Replace a release's manifest."""
        self.files[f"redistrib_{label}.json"] = json.dumps(manifest).encode()


@contextmanager
def serving(files: dict[str, bytes]) -> Iterator[Server]:
    """A server on this machine, as long as the block."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            name, wanted = unquote(self.path).lstrip("/"), self.headers.get("Range", "")
            server.asked.append((name, wanted))
            if server.redirect:
                self.send_response(302)
                self.send_header("Location", server.redirect)
                self.end_headers()
                return
            content = server.files.get(name)
            if content is None:
                self.send_error(404)
                return
            start = int(wanted.removeprefix("bytes=").rstrip("-")) if wanted and server.ranges else 0
            self.send_response(206 if start else 200)
            if start:
                self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
            self.send_header("Content-Length", str(len(content) - start))
            self.end_headers()
            rest = content[start:]
            if server.breaks and name.endswith(".xz"):
                server.breaks -= 1
                rest = rest[: len(rest) // 2]
            if server.stalls and name.endswith(".xz"):
                self.wfile.write(rest[: len(rest) // 2])
                self.wfile.flush()
                server.stalled.set()
                while server.stalls:
                    time.sleep(0.02)
                return
            for byte in rest if server.drips else ():
                with contextlib.suppress(OSError):
                    self.wfile.write(bytes([byte]))
                time.sleep(0.02)
            self.wfile.write(rest if not server.drips else b"")

        def log_message(self, *_: object) -> None:
            pass

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server = Server(address=f"http://127.0.0.1:{http.server_address[1]}", files=files)
    thread = threading.Thread(target=http.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        http.shutdown()
        http.server_close()
        thread.join()
