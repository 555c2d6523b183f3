"""Nothing on a page is cut or too small to read, on a screen and on a phone: a browser measures every page."""

import json
import shutil
import subprocess
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pytest

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)

SCRIPT = Path(__file__).with_name("measure_pages.js").read_text()


class Pages(SimpleHTTPRequestHandler):
    """Serves a site, and a page that measures all of its pages in frames and sends what it finds."""

    def __init__(self, *args: Any, arrived: Event, found: list[str], **kwargs: Any) -> None:
        self.arrived, self.found = arrived, found
        super().__init__(*args, **kwargs)

    def do_GET(self) -> None:
        if self.path != "/measure":
            return super().do_GET()
        site = Path(self.directory)
        pages = sorted(f"/{page.relative_to(site).as_posix()}" for page in site.rglob("*.html"))
        body = f"<!doctype html><body><script>const PAGES = {json.dumps(pages)};\n{SCRIPT}</script>"
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.end_headers()
        self.wfile.write(body.encode())

    def do_POST(self) -> None:
        self.found += json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.send_response(204)
        self.end_headers()
        self.arrived.set()

    def log_message(self, *_: Any) -> None:
        """Be silent."""


@pytest.mark.guarantees("cells-of-a-browser", "pages-are-measured")
@pytest.mark.release
@pytest.mark.skipif(BROWSER is None, reason="needs chromium or google-chrome")
def test_nothing_is_cut(site: Path, tmp_path: Path) -> None:
    arrived, found = Event(), []
    handler = partial(Pages, directory=str(site), arrived=arrived, found=found)
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        options = ("--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}")
        with subprocess.Popen(
            [BROWSER, *options, f"http://127.0.0.1:{server.server_port}/measure"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        ) as browser:
            try:
                assert arrived.wait(240), "the browser did not come to the end of the pages"
            finally:
                browser.terminate()
                server.shutdown()
    assert found == []
