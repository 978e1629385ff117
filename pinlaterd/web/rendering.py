"""Pages as HTML: their templates, with the files that they load.

Each file of static/ has a URL with its content's hash, so that browsers keep it for ever. A script
imports another by `from "/static/NAME"`, which becomes that one's URL.
"""

from __future__ import annotations

import gzip
import hashlib
import mimetypes
import re
from collections.abc import Mapping
from http import HTTPStatus
from pathlib import Path
from typing import NamedTuple

import jinja2
from aiohttp import web
from markupsafe import Markup, escape

from pinlaterd.http_port import takes_gzip
from pinlaterd.web import text
from pinlaterd.web.bodies import visible

_TEMPLATES = Path(__file__).parent / "templates"
_FILES = Path(__file__).parent / "static"
_FOREVER = "public, max-age=31536000, immutable"
_CODE = re.compile(r"`([^`]+)`")
_IMPORT = re.compile(rb'"/static/([\w.-]+)"')
_HASH_CHARS = 12
_COMPRESSED_BYTES = 1024  # of pages: smaller ones gain little


class _StaticFile(NamedTuple):
    body: bytes
    compressed: bytes
    content_type: str


class Rendering:
    """The templates, and the files of static/, as they were when the process started."""

    def __init__(self) -> None:
        self._urls: dict[str, str] = {}  # by name
        self._files: dict[str, _StaticFile] = {}  # by URL
        for path in sorted(_FILES.iterdir()):
            self.url(path.name)
        self._environment = jinja2.Environment(
            loader=jinja2.FileSystemLoader(_TEMPLATES),
            autoescape=True,
            undefined=jinja2.StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
            auto_reload=False,
        )
        self._environment.globals["asset"] = self.url
        self._environment.filters.update(text.FILTERS, visible=visible, marked=marked)

    def page(
        self,
        request: web.Request,
        template: str,
        values: Mapping[str, object],
        status: HTTPStatus = HTTPStatus.OK,
    ) -> web.Response:
        """Return a template with these values, compressed where the browser takes that."""
        page = self._environment.get_template(template).render(values)
        answer = web.Response(text=page, content_type="text/html", status=status)
        if len(page) >= _COMPRESSED_BYTES and takes_gzip(request):
            answer.enable_compression(web.ContentCoding.gzip)
            answer.headers["Vary"] = "Accept-Encoding"
        return answer

    def url(self, name: str) -> str:
        """Return the URL of a file of static/."""
        if name not in self._urls:
            body = (_FILES / name).read_bytes()
            if name.endswith(".js"):
                body = _IMPORT.sub(lambda found: f'"{self.url(found[1].decode())}"'.encode(), body)
            tag = hashlib.sha256(body).hexdigest()[:_HASH_CHARS]
            stem, _, kind = name.rpartition(".")
            self._urls[name] = url = f"/static/{stem}.{tag}.{kind}"
            content_type = mimetypes.guess_type(name)[0] or "application/octet-stream"
            compressed = gzip.compress(body, mtime=0)
            self._files[url] = _StaticFile(body, compressed, content_type)
        return self._urls[name]

    async def serve_file(self, request: web.Request) -> web.Response:
        """Answer with a file of static/."""
        file = self._files.get(request.path)
        if file is None:
            raise web.HTTPNotFound
        headers = {"Cache-Control": _FOREVER, "Vary": "Accept-Encoding"}
        body = file.body
        if takes_gzip(request):
            headers["Content-Encoding"], body = "gzip", file.compressed
        return web.Response(
            body=body, content_type=file.content_type, charset="utf-8", headers=headers
        )


def marked(said: str) -> Markup:
    """Return a text as HTML, with what stands in backticks as code."""
    return Markup(_CODE.sub(r"<code>\1</code>", str(escape(said))))  # noqa: S704 - it was escaped
