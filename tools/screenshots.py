"""Takes the pictures of the dashboard in docs/dashboard; look at each before you commit it.

Starts a deployment of its own with the quickstart's queues and six hours of made-up history, waits
until the dashboard says which queue no worker asks for, and takes each page in Debian's chromium.
"""

from __future__ import annotations

import argparse
import base64
import random
import shlex
import socket
import struct
import subprocess
import sys
import tempfile
import time
import zlib
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import quickstart_example
from playwright.sync_api import Browser, sync_playwright

from pinlaterd.client import Client, Job, JobState
from pinlaterd.coordinator.history import QUEUE, History, write_history
from pinlaterd.stats import Histogram

PICTURES = Path(__file__).parent.parent / "docs" / "dashboard"
CHROMIUM = "/usr/bin/chromium"
MOST_BYTES = 100_000
_ALIKE = 16  # the least by which two colours of a picture differ
_STOPPED_SECONDS = 180.0
_HOURS, _STEP_MS = 6, 5_000
_STOPPED_MS = 40 * 60_000
_PIXELS = """async (picture) => {
  const image = await createImageBitmap(await (await fetch(picture)).blob());
  const canvas = new OffscreenCanvas(image.width, image.height);
  const context = canvas.getContext("2d");
  context.drawImage(image, 0, 0);
  const { data } = context.getImageData(0, 0, image.width, image.height);
  const bytes = new Uint8Array(data.buffer);
  let text = "";
  for (let at = 0; at < bytes.length; at += 32768) {
    text += String.fromCharCode(...bytes.subarray(at, at + 32768));
  }
  return [image.width, image.height, btoa(text)];
}"""


class Picture(NamedTuple):
    """A page, and how it is looked at."""

    name: str
    path: str
    width: int = 1280
    height: int = 800
    scheme: str = "light"


def pictures(job: str) -> list[Picture]:
    """Return what is taken; `job`: a failed one."""
    return [
        Picture("overview", "/"),
        Picture("overview-dark", "/", scheme="dark"),
        Picture("overview-phone", "/", 360, 740),
        Picture("queue", "/q/images", height=960),
        Picture("failures", "/failures?queue=mail", height=600),
        Picture("job", f"/j/{job}", height=640),
        Picture("find", "/find?q=user21", height=600),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(prog="tools/screenshots", description=__doc__)
    parser.add_argument("--into", type=Path, default=PICTURES, help="folder (docs/dashboard)")
    into: Path = parser.parse_args().into
    into.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="screenshots-") as name:
        folder = Path(name) / "d"
        ports = {key: _free_port() for key in ("port", "stats-port", "http-port", "web-port")}
        given = [word for key, port in ports.items() for word in (f"--{key}", str(port))]
        _pinlaterd("init", str(folder), "--shards", "3", *given)
        with (folder / "etc/pinlaterd.yaml").open("a", encoding="utf-8") as file:
            file.write("web_label: PRODUCTION\nweb_writes: true\n")
        _pinlaterd("up", str(folder))
        try:
            leave_example(folder, ports["port"])
            take(into, ports["port"], ports["web-port"])
        finally:
            _pinlaterd("down", str(folder))


def leave_example(folder: Path, port: int) -> None:
    """Make the quickstart's queues, and a history of them that the coordinator reads at its start:
    it drops that of queues which it does not know."""
    quickstart_example.leave(lambda source: Client("127.0.0.1", port, source=source), folder)
    images, now_ms = quickstart_example.IMAGES, time.time_ns() // 1_000_000
    with Client("127.0.0.1", port) as client:
        while jobs := client.dequeue(images, limit=500):
            client.ack(images, succeeded=jobs)
        # As old as the history has them.
        step_ms = _STOPPED_MS // quickstart_example.READY_IMAGES
        times = range(now_ms - _STOPPED_MS, now_ms, step_ms)
        client.enqueue(images, [Job(b'{"width": 320}', run_after_ms=at_ms) for at_ms in times])
    _pinlaterd("down", str(folder))
    write_history(folder / "data/history", made_up_history().pack())
    _pinlaterd("up", str(folder))


def take(into: Path, port: int, web_port: int) -> None:
    """Take all pictures."""
    with Client("127.0.0.1", port) as client:
        job = next(iter(client.scan(quickstart_example.MAIL, JobState.FAILED))).descriptor
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page()
        page.goto(f"http://127.0.0.1:{web_port}/")
        page.get_by_text("images: stopped").first.wait_for(timeout=1000 * _STOPPED_SECONDS)
        for picture in pictures(job):
            file = into / f"{picture.name}.png"
            file.write_bytes(taken(browser, f"http://127.0.0.1:{web_port}", picture))
            size = file.stat().st_size
            print(f"{file}: {size:,} bytes{' TOO LARGE' if size > MOST_BYTES else ''}")
        browser.close()


def taken(browser: Browser, address: str, picture: Picture) -> bytes:
    """Return a picture as PNG with a palette."""
    context = browser.new_context(
        viewport={"width": picture.width, "height": picture.height},
        color_scheme="dark" if picture.scheme == "dark" else "light",
    )
    page = context.new_page()
    page.goto(address + picture.path)
    page.wait_for_timeout(1_500)  # until plots are drawn and the age is live
    taken_bytes = page.screenshot()
    blank = context.new_page()
    url = "data:image/png;base64," + base64.b64encode(taken_bytes).decode()
    width, height, pixels = blank.evaluate(_PIXELS, url)
    context.close()
    return png_of(width, height, base64.b64decode(pixels))


def png_of(width: int, height: int, pixels: bytes) -> bytes:
    """Return RGBA pixels as PNG with a palette of 256 colours: the commonest that differ, and for
    each other one that which is nearest."""
    codes = struct.unpack(f">{width * height}I", pixels)
    places: dict[int, int] = {}
    parts: list[bytes] = []
    for code, _ in Counter(codes).most_common():
        own = code.to_bytes(4, "big")[:3]
        far = [sum(abs(x - y) for x, y in zip(own, part, strict=True)) for part in parts]
        # A small mark has few pixels, and a colour that no text comes near.
        if len(parts) < 256 and min(far, default=_ALIKE) >= _ALIKE:
            places[code] = len(parts)
            parts.append(own)
        else:
            places[code] = far.index(min(far))
    rows = bytes([places[code] for code in codes])
    lines = b"".join(b"\0" + rows[at : at + width] for at in range(0, len(rows), width))
    head = struct.pack(">IIBBBBB", width, height, 8, 3, 0, 0, 0)
    chunks = [
        (b"IHDR", head),
        (b"PLTE", b"".join(parts)),
        (b"IDAT", zlib.compress(lines, 9)),
        (b"IEND", b""),
    ]
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))
        for kind, body in chunks
    )


def made_up_history() -> History:
    """Return a history in which the workers of `images` ended forty minutes ago."""
    chance, history = random.Random(7), History(32 << 20)
    now_ms = time.time_ns() // 1_000_000
    ready = 0.0
    for at_ms in range(now_ms - _HOURS * 3_600_000, now_ms - 2 * _STEP_MS, _STEP_MS):
        is_stopped = at_ms > now_ms - _STOPPED_MS
        arrived = 0.48 + 0.04 * chance.random()
        ready = ready + 5 * arrived if is_stopped else 20 * chance.random()
        done = 0.0 if is_stopped else arrived
        age_ms = max(0, at_ms - now_ms + _STOPPED_MS) if is_stopped else 300 * chance.random()
        waits = Histogram()
        for _ in range(0 if is_stopped else 3):
            waits.add(20 + 200 * chance.random() ** 3)
        row = [arrived, done, done, 0.02 * chance.random() * (not is_stopped), 0.0]
        history.record(QUEUE, "images", at_ms, [*row, ready, 0, 4, 12, age_ms], waits, activity=1.0)
    return history


def _pinlaterd(*arguments: str) -> None:
    command = [sys.executable, "-m", "pinlaterd", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"pinlaterd {shlex.join(arguments)}: {done.stderr or done.stdout}")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: Any = probe.getsockname()[1]
        return int(port)


if __name__ == "__main__":
    main()
