"""A source distribution -> the same files with the time of the commit, in one order, of nobody: equal bytes for equal content.

    python ci/repack_sdist.py FILE.tar.gz FOLDER

setuptools writes the times, the owner and the modes of the files that it finds, and gzip the time of the day.
"""

import gzip
import os
import sys
import tarfile
from pathlib import Path

source, target = Path(sys.argv[1]), Path(sys.argv[2])
epoch = int(os.environ["SOURCE_DATE_EPOCH"])
with (
    tarfile.open(source) as old,
    (target / source.name).open("xb") as file,
    gzip.GzipFile(filename="", mode="wb", fileobj=file, mtime=epoch) as packed,
    tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as new,
):
    for member in sorted(old.getmembers(), key=lambda each: each.name):
        if not (member.isfile() or member.isdir()):
            sys.exit(f"{source.name} holds {member.name}, which is neither a file nor a folder")
        member.mtime, member.uid, member.gid, member.uname, member.gname = epoch, 0, 0, "", ""
        member.mode = 0o755 if member.isdir() or member.mode & 0o100 else 0o644
        member.pax_headers = {}
        new.addfile(member, old.extractfile(member) if member.isfile() else None)
