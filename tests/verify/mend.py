"""Repair packages that cannot be imported in the environment that `make verify` has installed.

LLaMA-Factory requires torchvision and torchaudio. Package indexes have them for the CUDA builds of torch; next to a CPU
build, their libraries do not load. Nothing here processes images or sound.
"""

import importlib.util
import subprocess
import sys
from pathlib import Path


def can_import(name: str) -> bool:
    done = subprocess.run([sys.executable, "-c", f"import {name}"], capture_output=True, check=False)
    return done.returncode == 0


def main() -> None:
    if not can_import("torchvision"):
        # transformers imports it if it is installed; LLaMA-Factory needs it only for video.
        print("torchvision does not load beside this torch; it is removed")
        subprocess.run([sys.executable, "-m", "pip", "uninstall", "--quiet", "--yes", "torchvision"], check=True)
    if not can_import("torchaudio"):
        # LLaMA-Factory always imports it. Without its libraries it can be imported, but computes nothing.
        print("the libraries of torchaudio do not load beside this torch; they are removed")
        found = importlib.util.find_spec("torchaudio")
        for folder in (found.submodule_search_locations or ()) if found else ():
            for library in Path(folder).rglob("*.so"):
                library.unlink()
    for name in ("torchaudio", "transformers.modeling_utils", "llamafactory.launcher", "megatron.core"):
        if not can_import(name):
            sys.exit(f"{name} cannot be imported; see: {sys.executable} -c 'import {name}'")


if __name__ == "__main__":
    main()
