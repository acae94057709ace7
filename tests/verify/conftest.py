"""Print the versions that the output is checked against."""

import importlib.metadata
import importlib.util
import platform
import shutil
import subprocess
from collections.abc import Iterator

from topoplan.trainers.llamafactory.key_list import trainer_versions

PACKAGES = (
    *("torch", "transformers", "accelerate", "deepspeed", "llamafactory", "ms-swift", "trinity-rft", "verl"),
    *("megatron-core", "mcore-bridge", "mcore_adapter"),
)


def pytest_report_header() -> list[str]:
    return ["checked against: " + ", ".join(_versions())]


def _versions() -> Iterator[str]:
    for package in PACKAGES:
        try:
            yield f"{package} {importlib.metadata.version(package)}"
        except importlib.metadata.PackageNotFoundError:
            if package != "mcore_adapter":
                yield f"no {package}"
            elif importlib.util.find_spec(package) is None:
                yield f"a stand-in for mcore_adapter from the key list of {trainer_versions()[package]}"
            else:
                yield "mcore_adapter from PYTHONPATH"
    slurm = shutil.which("slurmctld")  # unlike sbatch, it prints its version without a configuration
    if slurm is None:
        yield "no slurm"
    else:
        yield subprocess.run([slurm, "-V"], capture_output=True, text=True, check=False).stdout.strip()
    yield f"Python {platform.python_version()}"
