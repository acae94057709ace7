"""Known causes of failures, as data: a pattern in a failed node's last lines, the likely cause, the remedy, the source.

Sources: `torch 2.13` printed the message in a run made for it; `pytorch#16417` is a thread of pytorch/pytorch, `nccl`
of NVIDIA/nccl, `llamafactory` of hiyouga/LlamaFactory; otherwise the source is the file or manual page that has the
message. The first pattern that matches a line counts, so specific patterns come before general ones.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import IntEnum


class Weight(IntEnum):
    """How much a line explains; a lower weight explains more."""

    CAUSE = 0
    """The failure originated here."""
    LINK = 1
    """Trouble on the way to another rank: the network, or a rank there that ended or hangs."""
    ECHO = 2
    """A consequence of another rank's end, or of somebody ending the job."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """A known cause of failures."""

    kind: str
    """Identifier for programs, shared by all patterns with the same remedy."""
    weight: Weight = Weight.CAUSE
    pattern: re.Pattern[str]
    """Searched for in a single line. Named groups fill `cause` and `remedy`."""
    cause: str
    """The likely cause, as a phrase without a full stop."""
    remedy: str
    """What to do, as a phrase without a full stop."""
    source: str


def _cause(kind: str, pattern: str, cause: str, remedy: str, source: str, weight: Weight = Weight.CAUSE) -> Cause:
    return Cause(kind=kind, weight=weight, pattern=re.compile(pattern), cause=cause, remedy=remedy, source=source)


_LESS_MEMORY = (
    "take a layout that needs less, with a smaller micro batch, more recomputation or more pipeline stages"
    " (`topoplan rank` says what each needs); nvidia-smi shows whether another process holds memory there"
)
HOST_MEMORY = (
    "if the kernel did it (`dmesg -T | grep -i oom` there, or the limit of the container), lower"
    " preprocessing_num_workers and dataloader_num_workers, or do without optimizer offload"
)
SHM = (
    "give the container more (--ipc=host, or --shm-size 16g), or mount /dev/shm larger; fewer dataloader"
    " workers need less"
)
REBOOTED_BY = "a crash of its system, a power cut, or an administrator"
REBOOTED = "see who or what did it: `last -x reboot` and the end of `journalctl -b -1` there"
FULL_DISK = "make room on that machine, or point output_dir, HF_HOME and TMPDIR to a larger disk"
TIDIED = "check what removed or changed it: a clean-up job, or a file system that is no longer mounted"
READ_ONLY_DISK = "see `dmesg` on that machine: file systems do so after errors of a disk; have it checked"
HANG = (
    "find out what it waits for: data, a file system that does not respond, a failed GPU, or a collective that not"
    " all ranks call; `py-spy dump --pid` on its machine shows where it hangs"
)
_INSTALL = "install it in the environment that the node script uses, in the same version on every node"
_VERSIONS = (
    "make the versions equal to those that the bundle's README names, on every node; `topoplan preflight` compares them"
)
_DRIVER = (
    "update the NVIDIA driver on that machine, or install a torch built for the CUDA version that nvidia-smi shows"
)
_GPU_BAD = (
    "look at `nvidia-smi -q` and `dmesg | grep -i xid` there; reset or replace the GPU, or leave the"
    " node out with --exclude"
)
_OTHER_RANK = (
    "find the rank that stopped first: a crash, a hang or a much slower rank elsewhere shows here only as a timeout;"
    " when none did, check links and interfaces with `topoplan preflight`"
)
_NETWORK = (
    "check cables, interfaces and firewalls between the nodes with `topoplan preflight`; NCCL_DEBUG=INFO"
    " says which link"
)
_DATA = "put the data on every node at that path, or correct dataset and dataset_dir in the spec and generate again"
_EARLIER_RUN = (
    "check whether an earlier run still uses it (`topoplan runs`, `topoplan runs stop ID`); if not, find the process"
    " with ss -ltnp"
)
_OTHER_LOG = "the cause is on another node; look at its log"

CAUSES: tuple[Cause, ...] = (
    # ---------------------------------------------------------------------------------------------- memory and disk
    _cause(
        "gpu-memory",
        r"CUDA out of memory\. Tried to allocate (?P<wanted>[0-9.]+ [KMG]iB)[. ]*\(?GPU (?P<gpu>[0-9]+)(?: has a"
        r" total capaci?ty of|;) (?P<total>[0-9.]+ [KMG]iB)(?: of which (?P<free>[0-9.]+ (?:[KMG]iB|bytes)) is free)?",
        "CUDA out of memory on GPU {gpu}: {wanted} more did not fit in its {total}{free:, with %s free}",
        _LESS_MEMORY,
        "pytorch#16417 (2.x), pytorch#59778 (1.x)",
    ),
    _cause(
        "gpu-memory",
        r"CUDA out of memory|CUDA error: out of memory|Cuda failure (?:[0-9]+ )?'out of memory'"
        r"|CUBLAS_STATUS_ALLOC_FAILED",
        "CUDA out of memory",
        _LESS_MEMORY,
        "CUDA runtime API, cudaErrorMemoryAllocation; cuBLAS; nccl#1197",
    ),
    _cause(
        "shm",
        r"Error while creating shared memory segment (?P<file>\S*/dev/shm/\S+)(?: \(size (?P<size>[0-9]+)\))?",
        "/dev/shm is too small for NCCL{size:, which wanted %s bytes more}",
        SHM,
        "nccl#1683, vllm-project/vllm#14537",
    ),
    _cause(
        "shm",
        r"unable to allocate shared memory\(shm\)|out of shared memory|insufficient shared memory \(shm\)"
        r"|(?:posix_fallocate|shm_open|ftruncate).{0,60}(?:No space left|failed : No space)",
        "/dev/shm is full",
        SHM,
        "torch 2.13; pytorch#5040; nccl#290",
    ),
    _cause(
        "disk-full",
        r"\[Errno 28\] No space left on device(?:: '(?P<path>[^']+)')?|No space left on device|\bENOSPC\b",
        "the disk is full{path:: %s}",
        FULL_DISK,
        "torch 2.13; Megatron-LM#878",
    ),
    _cause(
        "disk-full",
        r"\[Errno 122\]|Disk quota exceeded",
        "the user's disk quota is used up",
        "make room, ask for more, or point output_dir and HF_HOME elsewhere",
        "errno(3), EDQUOT",
    ),
    _cause(
        "disk-full",
        r"enforce fail at inline_container\.cc:[0-9]+\] \. unexpected pos|PytorchStreamWriter failed writing file"
        r"|basic_ios::clear: iostream error",
        "a checkpoint could not be written completely: the disk is full, or the file system failed",
        "look at `df` for output_dir on that machine; remove the incomplete checkpoint",
        "torch 2.13, a full file system",
    ),
    _cause(
        "host-memory",
        r"DefaultCPUAllocator: can't allocate memory: you tried to allocate (?P<size>[0-9]+) bytes",
        "host memory ran out: {size} bytes more were refused",
        HOST_MEMORY,
        "torch 2.13",
    ),
    _cause(
        "host-memory",
        r"DataLoader worker \(pid(?:\(s\))? [0-9, ]+\) is killed by signal: Killed|\[Errno 12\] Cannot allocate memory"
        r"|^MemoryError\b|oom[-_]kill|Out of memory: Killed process",
        "host memory ran out",
        HOST_MEMORY,
        "torch/utils/data/_utils/signal_handling.py; errno(3), ENOMEM",
    ),
    # ---------------------------------------------------------------------------------------------- the GPUs
    _cause(
        "driver",
        r"NVIDIA driver on your system is too old \(found version (?P<version>[0-9]+)\)",
        "the NVIDIA driver is too old for this torch (it offers CUDA {version})",
        _DRIVER,
        "torch/cuda/__init__.py; lllyasviel/Fooocus#1313",
    ),
    _cause(
        "driver",
        r"CUDA driver version is insufficient for CUDA runtime version"
        r"|the provided PTX was compiled with an unsupported",
        "the NVIDIA driver is too old for this build of CUDA",
        _DRIVER,
        "CUDA runtime API, cudaErrorInsufficientDriver",
    ),
    _cause(
        "driver",
        r"Driver/library version mismatch|CUDA error: system not yet initialized",
        "the NVIDIA driver or its fabric manager is not working properly",
        "restart the machine after a driver update; on NVSwitch machines check `systemctl status nvidia-fabricmanager`",
        "CUDA runtime API, cudaErrorSystemNotReady; NVML",
    ),
    _cause(
        "no-gpu",
        r"No CUDA GPUs are available|Found no NVIDIA driver on your system|Torch not compiled with CUDA enabled"
        r"|no CUDA-capable device is detected",
        "torch sees no GPU there",
        "check nvidia-smi, CUDA_VISIBLE_DEVICES and the container's --gpus there, and that torch is a CUDA build",
        "torch/cuda/__init__.py; torch 2.13",
    ),
    _cause(
        "no-gpu",
        r"CUDA error: invalid device ordinal",
        "there are fewer GPUs than processes",
        "compare `nvidia-smi -L` and CUDA_VISIBLE_DEVICES there with gpus_per_node in the spec; leave the"
        " node out, or plan anew",
        "CUDA runtime API, cudaErrorInvalidDevice",
    ),
    _cause(
        "gpu-busy",
        r"CUDA-capable devices? (?:is|are all|are) busy or unavailable",
        "a GPU is in exclusive mode and in use, or faulty",
        "see `nvidia-smi -q -d COMPUTE,PIDS` there",
        "CUDA runtime API, cudaErrorDevicesUnavailable",
    ),
    _cause(
        "gpu-twice",
        r"Duplicate GPU detected : rank (?P<one>[0-9]+) and rank (?P<other>[0-9]+) both on CUDA device (?P<device>\w+)",
        "ranks {one} and {other} are on the same GPU ({device})",
        "give each process a GPU of its own: check CUDA_VISIBLE_DEVICES; slices of one MIG GPU cannot be in"
        " one NCCL group",
        "nccl#1241, Megatron-LM#661",
    ),
    _cause(
        "gpu-kind",
        r"no kernel image is available for execution on the device",
        "torch or a kernel was not built for this kind of GPU",
        "install builds for its compute capability (torch.cuda.get_arch_list() lists what torch has)",
        "CUDA runtime API, cudaErrorNoKernelImageForDevice",
    ),
    _cause(
        "gpu-broken",
        r"uncorrectable ECC error|GPU is lost|fallen off the bus|CUDA error: hardware stack error|NVRM: Xid",
        "a GPU is broken or has lost its link",
        _GPU_BAD,
        "huggingface/trl#4149, vllm-project/vllm#5222; Xid 79",
    ),
    _cause(
        "gpu-fault",
        r"(?:CUDA error: |Cuda failure (?:[0-9]+ )?')(?P<what>an illegal memory access was encountered|misaligned"
        r" address|unspecified launch failure|device-side assert triggered|an illegal instruction was encountered)",
        "a kernel failed: {what}",
        "run once with CUDA_LAUNCH_BLOCKING=1 to see which; a wrong token id or label, a kernel of another version"
        " and a failing GPU all look like this",
        "InternLM/lmdeploy#3258, pytorch#131755",
    ),
    # ---------------------------------------------------------------------------------------------- start and network
    _cause(
        "port",
        r"port: (?P<port>[0-9]+), .*EADDRINUSE",
        "port {port} is taken on node 0",
        f"{_EARLIER_RUN} | grep {{port}}",
        "torch 2.13",
    ),
    _cause(
        "port",
        r"(?:server socket has failed to (?:bind|listen)|bind).*(?:[Aa]ddress already in use|EADDRINUSE)",
        "the master port is taken on node 0",
        _EARLIER_RUN,
        "meta-pytorch/torchtune#392",
    ),
    _cause(
        "rendezvous",
        r"client socket has timed out after (?P<ms>[0-9]+)ms while trying to connect to \((?P<host>[^,]+), "
        r"(?P<port>[0-9]+)\)",
        "node 0 did not answer on {host} port {port}",
        "it did not start, ended first, has another address there, or a firewall is between: see its log;"
        " `topoplan preflight` tries the port from every node",
        "torch 2.13",
        Weight.LINK,
    ),
    _cause(
        "rendezvous",
        r"Timed out after (?P<s>[0-9]+) seconds waiting for clients\. (?P<joined>[0-9]+/[0-9]+) clients joined",
        "only {joined} nodes joined within {s} s",
        "a node did not start, or does not reach node 0's port: see the others' logs; `topoplan preflight`"
        " tries the port",
        "torch 2.13",
        Weight.LINK,
    ),
    _cause(
        "rdma",
        r"Call to (?P<call>ibv_(?:reg_mr|create_cq|create_qp)\w*) failed(?: with error)?.*(?:Cannot allocate memory)?",
        "RDMA memory could not be pinned ({call})",
        "raise memlock to unlimited for the session that starts the job (limits.conf, or LimitMEMLOCK of"
        " sshd); `ulimit -l` shows it",
        "NVIDIA/nccl-tests#206, nccl#380",
    ),
    _cause(
        "rdma",
        r"Call to ibv_modify_qp failed|ibv_modify_qp failed",
        "two RDMA ports cannot connect: a wrong GID index, MTU or partition",
        "leave NCCL_IB_GID_INDEX unset with NCCL 2.21 or later, and compare GIDs and MTU of the nodes"
        " (`topoplan preflight`)",
        "nccl#769, nccl#426",
        Weight.LINK,
    ),
    _cause(
        "rdma",
        r"NET/IB ?: Got completion from peer (?P<peer>\S+) with (?:error|status=?) ?(?P<code>[0-9]+)",
        "the RDMA link to {peer} failed (error {code}; 12 means no response)",
        "if no rank ended there: check that port's cable and errors (ibstat, perfquery), MTU and GIDs of both nodes",
        "tatsu-lab/stanford_alpaca#207, nccl#426",
        Weight.LINK,
    ),
    _cause(
        "interface",
        r"Bootstrap : no socket interface found|no NCCL_SOCKET_IFNAME interface found|Unable to find address for:"
        r" ?(?P<name>\S+)|connecting to address\s+with family [0-9]+ is neither",
        "the network interface for NCCL or gloo is not on that machine{name:: %s}",
        "correct socket_interface of that host in the spec (`ip -br addr` lists them) and generate again",
        "nccl/src/bootstrap.cc; nccl#1837; gloo/transport/tcp/device.cc",
    ),
    _cause(
        "network",
        r"(?:[Cc]onnect(?:ed)? to|socketPollConnect|socketStartConnect|SO_ERROR|connect).{0,120}"
        r"(?P<what>No route to host|Network is unreachable|Connection refused|Connection timed out)",
        "another node could not be reached: {what}",
        _NETWORK,
        "sgl-project/sglang#3820, pytorch#68893",
        Weight.LINK,
    ),
    _cause(
        "nccl-version",
        r"NCCL version (?:mismatch|needs to match)|mismatched NCCL version|undefined symbol: nccl\w+",
        "the nodes have different versions of NCCL",
        _VERSIONS,
        "nccl#286; ld.so(8)",
    ),
    _cause(
        "nccl-timeout",
        r"Rank (?P<rank>[0-9]+)\] Watchdog caught collective operation timeout: WorkNCCL\(SeqNum=(?P<number>[0-9]+), "
        r"OpType=(?P<op>\w+).*Timeout\(ms\)=(?P<ms>[0-9]+)",
        "rank {rank} waited {ms} ms for others in {op} number {number}",
        _OTHER_RANK,
        "Megatron-LM#1207, llamafactory#7396",
        Weight.LINK,
    ),
    _cause(
        "nccl-timeout",
        r"Watchdog caught collective operation timeout|Some NCCL operations have failed or timed out"
        r"|Timed out waiting [0-9]+ms for (?:recv|send) operation to complete|wait timeout after [0-9]+ms"
        r"|HeartbeatMonitor|failed to recv, got 0 bytes",
        "ranks waited for others until they timed out",
        _OTHER_RANK,
        "nccl#1609; gloo/transport/tcp/unbound_buffer.cc; torch 2.13",
        Weight.LINK,
    ),
    _cause(
        "nccl-peer",
        r"ncclRemoteError|remote process exited or there was a network error|Connection closed by remote peer"
        r"|Connection closed by peer|Connection reset by peer|[Bb]roken pipe|Software caused connection abort"
        r"|NCCL communicator was aborted|TCPStore.*recvValue failed|Rank [0-9]+ failed to pass monitoredBarrier",
        "another rank ended, or the network between them broke",
        _OTHER_LOG,
        "nccl#2076, nccl#795; torch 2.13 with gloo",
        Weight.ECHO,
    ),
    _cause(
        "nccl",
        r"(?P<error>nccl(?:SystemError|InternalError|UnhandledCudaError|InvalidUsage|InvalidArgument))\b"
        r"|NCCL error in: [^,]*, (?P<words>[\w ]+)|\bDist(?:Backend|Network|Store)Error\b",
        "ranks cannot communicate{error:: %s}{words:: %s}",
        "read the lines after `Last error` and the NCCL WARN lines before it; NCCL_DEBUG=INFO says more",
        "nccl#975, nccl#1514",
        Weight.LINK,
    ),
    # ---------------------------------------------------------------------------------------------- software and files
    _cause(
        "arguments",
        r"^\S+: error: (?P<what>unrecognized arguments: .+|the following arguments are required: .+|argument .+: .+)",
        "the trainer does not take its arguments: {what}",
        "correct them in the spec and generate again, or install the version of the trainer that knows them",
        "argparse, Python 3.13",
    ),
    _cause(
        "key",
        r"Some keys are not used by the HfArgumentParser: (?P<keys>\[[^\]]*\])",
        "the trainer does not know {keys} in train.yaml",
        "correct the key under job.trainer in the spec and generate again, or install the LLaMA-Factory that knows it",
        "transformers/hf_argparser.py; llamafactory#5633",
    ),
    _cause(
        "version",
        r"(?:ImportError|PackageNotFoundError|VersionConflict).*?(?P<what>\S+ is required for a normal functioning of"
        r" this module, but found \S+)",
        "a package has another version: {what}",
        _VERSIONS,
        "transformers/utils/versions.py",
    ),
    _cause(
        "module",
        # The error itself, or python's message for `-m`. A warning that names a module (torch without NumPy) stops
        # nothing.
        r"(?:ModuleNotFoundError: |python[\d.]*: )No module named ['\"]?(?P<name>[\w.]+)",
        "the Python module {name} is not installed there",
        _INSTALL,
        "torch 2.13",
    ),
    _cause(
        "version",
        r"cannot import name '(?P<name>[^']+)' from (?:partially initialized module )?'(?P<module>[^']+)'",
        "{module} has no {name}: another version is expected",
        _VERSIONS,
        "torch 2.13",
    ),
    _cause(
        "version",
        r"undefined symbol: (?P<symbol>\w+)|(?P<library>[\w.-]+\.so[.\w]*): cannot open shared object file"
        r"|version `(?P<glibc>GLIBC\w*_[0-9.]+)' not found",
        "a compiled package is incompatible with the others there{symbol: (undefined symbol %s)}{library: (no"
        " %s)}{glibc: (no %s)}",
        "install it again, built for this torch, CUDA and system",
        "ld.so(8)",
    ),
    _cause(
        "dataset",
        r"Undefined dataset (?P<name>\S+) in|File (?P<file>\S+) not found\.|Cannot open (?P<info>\S*dataset_info\S*)"
        r" due to|Cannot find valid samples",
        "the data set cannot be read{name:: no %s in dataset_info.json}{file:: no %s}{info:: %s}",
        _DATA,
        "llamafactory/data/parser.py and loader.py; llamafactory#7703",
    ),
    _cause(
        "template",
        r"Template (?P<name>\S+) does not exist",
        "LLaMA-Factory there has no template {name}",
        "correct job.template, or install the version of LLaMA-Factory that has it",
        "llamafactory/data/template.py",
    ),
    _cause(
        "model",
        r"No valid config found in (?P<path>.+)|Model (?P<kind>\S+) is not supported by mcore_adapter|(?:Incorrect"
        r" path_or_model_id|Repo id must (?:be|use)|is not a local folder and is not a valid model).*?(?P<id>'[^']+')?",
        "the model cannot be read{path:: no config.json in %s}{kind:: the adapter has no %s}",
        "download the model to the path in train.yaml on every node (the adapter reads no hub ids)",
        "mcore_adapter/models/auto/config_auto.py; llamafactory/train/mca/workflow.py; transformers/utils/hub.py",
    ),
    _cause(
        "model",
        r"LocalEntryNotFoundError|We couldn't connect to '(?P<hub>https?://[^']+)'",
        "a model or tokenizer is not on that machine, and could not be downloaded from the Hub",
        "download it to the path in train.yaml on every node: a name that is no directory there is taken for"
        " one of the Hub's",
        "huggingface_hub/file_download.py; transformers/utils/hub.py",
    ),
    _cause(
        "permission",
        r"\[Errno (?:13|1|30)\] (?P<what>Permission denied|Operation not permitted"
        r"|Read-only file system)(?:: '(?P<path>[^']+)')?",
        "{what}{path:: %s}",
        "give the login user read and write access, or name another path",
        "torch 2.13",
    ),
    _cause(
        "file",
        r"\[Errno (?:2|20|21)\] (?:No such file or directory|Not a directory|Is a directory): '(?P<path>[^']+)'",
        "a file is missing there: {path}",
        "put it there on every node, or correct the path in the spec and generate again",
        "torch 2.13",
    ),
    _cause(
        "not-found",
        r"(?:bash|sh|env|setsid|exec)\b.*: (?P<path>[^:]+): (?:command not found|not found|No such file or directory)",
        "{path} is not on that machine",
        "give the path of the environment as `venv` of that host in the spec, and generate again",
        "bash(1), dash(1)",
    ),
    _cause(
        "nan",
        r"found NaN|Unexpected result nan|(?:loss|grad norm)\w* is (?:NaN|nan|inf)|rank [0-9]+: found (?:nan|inf)",
        "NaN or infinity in the loss or the gradients",
        "lower the learning rate or raise warmup_steps; look for empty or broken samples at that step",
        "megatron/core/distributed/param_and_grad_buffer.py; megatron/core/rerun_state_machine.py",
    ),
    # ---------------------------------------------------------------------------------------------- ended from outside
    _cause(
        "terminated",
        r"got signal: (?P<number>[0-9]+)|Received (?P<death>[0-9]+) death signal",
        "it was stopped from outside{number:, by signal %s}{death:, by signal %s}",
        "somebody or something on that machine ended it: a scheduler, an administrator, or a shutdown",
        "torch 2.13",
        Weight.ECHO,
    ),
)
