"""What is in the wheel and the sdist, and what must not be: `wheel_contents.py WHEEL SDIST`."""

import email
import sys
import tarfile
import zipfile
from pathlib import PurePosixPath

WHEEL, SDIST = sys.argv[1:]
with zipfile.ZipFile(WHEEL) as archive:
    wheel = {name for name in archive.namelist() if ".dist-info/" not in name}
    (record,) = (name for name in archive.namelist() if name.endswith("/METADATA"))
    metadata = email.message_from_bytes(archive.read(record))
with tarfile.open(SDIST) as archive:
    sdist = {str(PurePosixPath(*PurePosixPath(n).parts[1:])) for n in archive.getnames()}

for wanted in (
    "jaxkfac/py.typed",
    "jaxkfac/jobs/report/_page.css",
    "jaxkfac/jobs/report/_page.js",
    "torch_ref/lslora/peft_plugin.py",  # jaxkfac[peft]
):
    assert wanted in wheel, f"{wanted} is not in the wheel"
for name in sorted(wheel):
    top = name.split("/")[0]
    assert top in ("jaxkfac", "torch_ref"), f"{name} is in the wheel"
    assert not name.endswith(("_test.py", "conftest.py", ".pyc")), f"{name} is in the wheel"
assert wheel <= sdist, f"not in the sdist: {sorted(wheel - sdist)}"
for name in ("Author", "License-Expression", "Requires-Python", "Description-Content-Type"):
    assert metadata[name], f"the wheel does not say its {name}"
print(f"{len(wheel)} files in the wheel, {len(sdist)} in the sdist; {metadata['Author']}")
