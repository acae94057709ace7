"""Prints the versions of what a run needs, one per line, without importing any of it.

Runs on a host with Python 3.8 or later.
"""

import importlib.machinery
import importlib.metadata
import re
import sys
from pathlib import Path

sys.path = [entry for entry in sys.path if entry]  # not the directory in which the session happens to be
NAMES = "@names@"
"""Filled in by the sender of this program. Distributions are found whether their names contain - or _."""
ALSO = {
    "transformer-engine": ("transformer_engine_torch",),
    "nccl": ("nvidia-nccl-cu13", "nvidia-nccl-cu12", "nvidia-nccl-cu11"),
}
found = {"executable": sys.executable, "python": sys.version.split()[0]}
for name in NAMES.split():
    for distribution in (name, *ALSO.get(name, ())):
        try:
            found[name] = importlib.metadata.version(distribution)
            break
        except Exception:
            continue
try:
    # Importing torch takes seconds, and may access the GPUs.
    torch = importlib.machinery.PathFinder.find_spec("torch")
    text = Path(str(torch and torch.origin)).with_name("version.py").read_text()
    for name, variable in (("torch", "__version__"), ("cuda", "cuda")):
        match = re.search(rf"^{variable}\b[^=\n]*=\s*['\"]([^'\"]+)", text, re.MULTILINE)
        if match:
            found[name] = match[1]
except Exception:
    pass
if "nccl" not in found:
    for header in ("/usr/include/nccl.h", "/usr/local/include/nccl.h"):
        try:
            text = Path(header).read_text()
            found["nccl"] = ".".join(re.findall(r"#define NCCL_(?:MAJOR|MINOR|PATCH)\s+(\d+)", text)[:3])
            break
        except Exception:
            continue
sys.stdout.write("".join(f"{name}\t{version}\n" for name, version in found.items()))
