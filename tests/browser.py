#!/usr/bin/env python3
"""Opens HTML files in headless Chromium, and checks that they work without a network:

    tests/browser.py FILE.html ..    no message on the console, nothing that loads from a network, and charts with
                                     drawn marks: shapes in the page, and pixels of several colours in a
                                     screenshot
    tests/browser.py --self-test     pages with planted errors fail

The marks are `polygon`, `path`, `rect`, `line` and `circle` within `svg`, and `canvas`. Where Chromium is not
installed the check is skipped with a message; with REQUIRE_BROWSER=1 that is an error.
"""

import os
import pathlib
import re
import shutil
import struct
import subprocess
import sys
import tempfile
import zlib

NAMES = ["chromium", "chromium-browser", "google-chrome", "google-chrome-stable"]
WIDTH, HEIGHT = 1000, 1400
# Of the whole screenshot, as one in this many.
LEAST_SHARE = 200
LEAST_COLOURS = 3
LEAST_SHAPES = 3
TIMEOUT = 60
# What loads from the network; a link to click on does not. The browser logs no failed request.
NETWORK = [
    re.compile(r"""<(?!a\b)\w+\b[^>]*\s(src|href|data|xlink:href)\s*=\s*["']?(https?:)?//[^>]*""", re.IGNORECASE),
    re.compile(r"""(url\(\s*["']?(https?:)?//|@import\b)[^;]*"""),
    re.compile(r"\b(fetch|importScripts|sendBeacon|WebSocket|EventSource|XMLHttpRequest)\s*\("),
]
# `CONSOLE` begins a message of the page, whichever its level.
CONSOLE = re.compile(r':CONSOLE[:(]\d+[)\]]* "(.*)", source: (.*)')
SHAPE = re.compile(r"<(polygon|polyline|path|rect|line|circle|canvas)\b")


def browser():
    """The path of a browser, or None."""
    return next((path for path in map(shutil.which, NAMES) if path), None)


def chromium(path, *arguments):
    """The output of a headless browser, which has no network, and what it logs."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as home:
        flags = [
            "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
            "--hide-scrollbars", "--enable-logging=stderr", "--disable-background-networking",
            "--host-resolver-rules=MAP * ~NOTFOUND", f"--user-data-dir={home}",
            f"--window-size={WIDTH},{HEIGHT}", "--virtual-time-budget=2000",
        ]
        done = subprocess.run(
            [path, *flags, *arguments], capture_output=True, text=True, timeout=TIMEOUT, errors="replace"
        )
    if done.returncode != 0:
        raise AssertionError(f"{path} ended with exit code {done.returncode}:\n{done.stderr}")
    return done.stdout, done.stderr


def pixels(png):
    """The number of pixels of each colour in a PNG of 8 bits a channel (https://www.w3.org/TR/png)."""
    assert png.startswith(b"\x89PNG\r\n\x1a\n"), "the screenshot is no PNG"
    at, data = 8, b""
    while at < len(png):
        length, kind = struct.unpack(">I4s", png[at : at + 8])
        chunk = png[at + 8 : at + 8 + length]
        if kind == b"IHDR":
            width, height, depth, colour, _, _, interlaced = struct.unpack(">IIBBBBB", chunk)
            assert depth == 8 and colour in (2, 6) and not interlaced, "an unexpected form of PNG"
        if kind == b"IDAT":
            data += chunk
        at += 12 + length
    size = 3 if colour == 2 else 4
    data, stride = zlib.decompress(data), width * size
    before, counts = bytearray(stride), {}
    for row in range(height):
        start = row * (stride + 1)
        before = unfiltered(data[start], data[start + 1 : start + 1 + stride], before, size)
        for x in range(0, stride, size):
            pixel = bytes(before[x : x + 3])
            counts[pixel] = counts.get(pixel, 0) + 1
    return counts


def unfiltered(kind, line, above, size):
    """A row of pixels, from its difference to its neighbours."""
    out = bytearray(line)
    if kind == 0:
        return out
    for i in range(len(out)):
        left = out[i - size] if i >= size else 0
        corner = above[i - size] if i >= size else 0
        up = above[i]
        if kind == 4:
            estimate = left + up - corner
            near = [(abs(estimate - value), order) for order, value in enumerate((left, up, corner))]
            guess = (left, up, corner)[min(near)[1]]
        else:
            guess = {1: left, 2: up, 3: (left + up) // 2}[kind]
        out[i] = (out[i] + guess) & 255
    return out


def check(path, page):
    """Opens a page. An AssertionError says what is wrong with it."""
    page = pathlib.Path(page).resolve()
    dom, log = chromium(path, "--dump-dom", page.as_uri())
    messages = [f"{text} ({source})" for text, source in CONSOLE.findall(log)]
    assert not messages, f"{page}: messages on the console: {messages}"
    loads = [found.group(0) for pattern in NETWORK for found in pattern.finditer(dom)]
    assert not loads, f"{page}: the page uses the network: {loads}"
    charts = re.findall(r"<svg\b.*?</svg>|<canvas\b", dom, re.DOTALL)
    assert charts, f"{page}: the page has no chart"
    for index, chart in enumerate(charts):
        shapes = len(SHAPE.findall(chart))
        least = 1 if chart.startswith("<canvas") else LEAST_SHAPES
        assert shapes >= least, f"{page}: chart {index} has {shapes} shapes"
    with tempfile.TemporaryDirectory() as folder:
        picture = pathlib.Path(folder) / "page.png"
        chromium(path, f"--screenshot={picture}", page.as_uri())
        counts = pixels(picture.read_bytes())
    background = max(counts, key=counts.get)
    drawn = sum(counts.values()) - counts[background]
    # Letters are grey, so that colours are those of charts.
    coloured = {pixel: n for pixel, n in counts.items() if max(pixel) - min(pixel) > 24 and n > 20}
    assert drawn * LEAST_SHARE >= sum(counts.values()), f"{page}: only {drawn} pixels are drawn"
    assert len(coloured) >= LEAST_COLOURS, f"{page}: the screenshot has {len(coloured)} colours"
    print(f"{page.name}: {len(charts)} charts, {drawn} pixels drawn, {len(coloured)} colours")


def self_test(path):
    """Pages with one planted error each fail with a text that names it."""
    shapes = "".join(
        f'<polygon fill="{fill}" points="0,{y} 600,{y} 600,{y + 90} 0,{y + 90}"/>'
        for y, fill in ((0, "#0072b2"), (100, "#d55e00"), (200, "#009e73"))
    )
    chart = f'<svg width="700" height="400">{shapes}</svg>'
    broken = {
        "messages on the console": f"{chart}<script>missing();</script>",
        "uses the network": f'{chart}<img src="https://example.org/x.png">',
        "no chart": "<p>nothing</p>",
        "0 shapes": '<svg width="9" height="9"></svg>',
        "Expected number": chart.replace("600,0", "NaN,0"),
        "pixels are drawn": chart.replace("<svg", '<svg style="visibility: hidden"'),
        "0 colours": re.sub(r"#\w{6}", "#222222", chart),
    }
    with tempfile.TemporaryDirectory() as folder:
        page = pathlib.Path(folder) / "page.html"

        def write(body):
            page.write_text(f"<!DOCTYPE html><meta charset=utf-8><title>t</title>{body}", encoding="utf-8")

        link = '<a href="https://example.org/">a source</a>'
        write(f"{chart}{link}<script>document.title = 'works';</script>")
        check(path, page)
        for expected, body in broken.items():
            write(body)
            try:
                check(path, page)
            except AssertionError as error:
                assert expected in str(error), f"{expected}: {error}"
            else:
                sys.exit(f"a page with a planted error passes: {expected}")
    print(f"{len(broken)} pages with planted errors fail")


def main(arguments):
    if not arguments:
        sys.exit(__doc__)
    path = browser()
    if path is None:
        message = f"skipped: none of {', '.join(NAMES)} was found"
        sys.exit(message if os.environ.get("REQUIRE_BROWSER") == "1" else print(message))
    try:
        if arguments == ["--self-test"]:
            self_test(path)
        else:
            for page in arguments:
                check(path, page)
    except AssertionError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main(sys.argv[1:])
