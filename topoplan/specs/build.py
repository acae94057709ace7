"""From a checked form to a cluster and a job: what the values mean together, and the usual machine of a GPU.

Two ways to describe the links of a cluster:

- The short form gives none of `nvlink_bandwidth`, `ib_bandwidth` and `nics_per_node`. The links are then those of
  the GPU's usual machine (an HGX box with one NIC a GPU, an NVL72 rack, a PCIe server), and `gpus_per_node` may be
  left out too.
- Otherwise what is left out is absent: no `nvlink_bandwidth` means that the GPUs of a node talk over PCIe, and more
  than one node needs an `ib_bandwidth`. Only the number of NICs still defaults to the usual one.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NoReturn

from topoplan import catalog
from topoplan.errors import InputError, LayoutError, SpecError, UnitError
from topoplan.specs.cluster import MOST_GPUS, Cluster, Fabric, Host
from topoplan.specs.gpu import Gpu
from topoplan.specs.job import Job, usual_learning_rate
from topoplan.specs.lengths import Lengths
from topoplan.specs.model import Model
from topoplan.specs.source import KeyPath
from topoplan.units import format_byte_rate

if TYPE_CHECKING:
    from topoplan.specs.forms import FabricForm, GpuForm, JobForm, SpecForm

# One small message over TCP sockets passes two kernels; Fabric's own default is that of RDMA.
_TCP_LATENCY_S = 30e-6
_PCIE_GEN4_BYTES_PER_S = 32e9
_PCIE_GEN5_BYTES_PER_S = 64e9
_PCIE_GPUS_OF_A_SOCKET = 4
_OLDEST_WITH = {"fp4": "blackwell", "fp8": "hopper", "": "ampere"}
_PCIE_GEN5_SINCE = "hopper"


@dataclass(frozen=True, slots=True, kw_only=True)
class Builder:
    """One document on its way to a cluster and a job."""

    form: SpecForm
    place: Callable[[KeyPath], str]
    """`file:line` of a value."""
    raw: Mapping[str, Any]
    """The document as it was written, for messages."""
    is_run_document: bool = False
    """One of `topoplan predict`, where `nodes` may be left out."""

    def fail(self, path: KeyPath, what: str, *, expected: str = "", remedy: str = "") -> NoReturn:
        """Raise a SpecError at a key."""
        raise SpecError(what, where=self.place(path), expected=expected, remedy=remedy)

    # -------------------------------------------------------------------------------------- cluster

    def cluster(self, default_name: str) -> Cluster:
        """The cluster. An empty `default_name` becomes one made of the GPU and the counts. Raises SpecError."""
        form = self.form
        gpu, in_catalog = self._gpu()
        links_given = any(link is not None for link in (form.nvlink_bandwidth, form.ib_bandwidth, form.nics_per_node))
        is_short = in_catalog and not links_given
        nodes = self._nodes()
        gpus_per_node = form.gpus_per_node or (gpu.gpus_per_node if is_short else 0)
        if not gpus_per_node:
            self.fail((), "`gpus_per_node` is missing", remedy="add `gpus_per_node: 8`")
        if nodes * gpus_per_node > MOST_GPUS:
            self.fail(
                ("nodes",),
                f"nodes {nodes} * gpus_per_node {gpus_per_node} = {nodes * gpus_per_node} GPUs",
                expected=f"expected at most {MOST_GPUS}",
            )

        nvlink = gpu.nvlink_bytes_per_s if is_short else self._nvlink(gpu, in_catalog)
        usual_nics = max(1, round(gpu.nics_per_node * gpus_per_node / gpu.gpus_per_node))
        if form.ib_bandwidth is None and not is_short and nodes > 1:
            self.fail(
                ("nodes",),
                f"`ib_bandwidth` is missing, and {nodes} nodes need a network",
                remedy="add `ib_bandwidth: 400Gb/s` (the rate of one NIC), or leave nvlink_bandwidth and nics_per_node "
                "out too to take the GPU's usual machine",
            )
        cluster = Cluster(
            name=form.name or default_name or f"{gpu.name}-{nodes}x{gpus_per_node}",
            nodes=nodes,
            gpus_per_node=gpus_per_node,
            gpu=gpu,
            nvlink_bytes_per_s=nvlink,
            nvlink_domain_gpus=_nvlink_domain(gpu, nvlink, nodes, gpus_per_node),
            pcie_bytes_per_s=form.pcie_bandwidth or gpu.pcie_bytes_per_s,
            nics_per_node=form.nics_per_node or usual_nics,
            nic_bytes_per_s=form.ib_bandwidth or gpu.nic_bytes_per_s,
            sockets=form.sockets or (1 if gpus_per_node <= _PCIE_GPUS_OF_A_SOCKET and not nvlink else 2),
            fabric=Fabric(),
            host_memory_bytes=form.host_memory,
            cpu_cores=form.cpu_cores,
            hosts=self._hosts(nodes),
            env=form.env or {},
            secrets=tuple(form.secrets or ()),
            software=form.software or {},
            slurm=form.slurm or {},
            margin=form.margin,
        )
        if both := sorted(set(cluster.secrets) & set(cluster.env)):
            self.fail(("secrets",), f"{both[0]} is under env too", remedy="leave it out there")
        self._check_rack(cluster)
        self._check_hcas(cluster)
        return replace(cluster, fabric=self._fabric(cluster))

    def _check_rack(self, cluster: Cluster) -> None:
        rack, gpus = cluster.gpu.nvlink_domain_gpus, cluster.gpus_per_node
        is_rack = cluster.nvlink_bytes_per_s and rack > cluster.gpu.gpus_per_node
        if is_rack and cluster.nodes > 1 and rack % gpus:
            self.fail(
                ("gpus_per_node",) if self.form.gpus_per_node else (),
                f"gpus_per_node: {rack} GPUs of an NVLink domain % {gpus} GPUs of a node = {rack % gpus}",
                expected=f"expected a divisor of {rack}; the usual machine has {cluster.gpu.gpus_per_node}",
            )

    def _check_hcas(self, cluster: Cluster) -> None:
        """HCAs are chosen by NCCL_IB_HCA, which NCCL_IB_DISABLE and AWS's plugin leave unread."""
        kind = self.form.fabric.kind if self.form.fabric else None
        whys = {"ethernet": "which is TCP without RDMA", "efa": "whose plugin takes all adapters that there are"}
        for index, host in enumerate(cluster.hosts):
            if kind in whys and host.hcas:
                self.fail(
                    ("hosts", index, "hcas"),
                    f"hosts[{index}].hcas: RDMA adapters with fabric.kind {kind}, {whys[kind]}",
                    remedy="make it kind: roce, or leave hcas out" if kind == "ethernet" else "leave hcas out",
                )

    def _gpu(self) -> tuple[Gpu, bool]:
        """The GPU, and whether it is one of the catalog (with a usual machine)."""
        form = self.form.gpu
        figures = form.given()
        try:
            return _with_figures(catalog.gpu(form.name), form), True
        except SpecError as error:
            if set(figures) == {"name"}:
                raise relocated(error, f"{self.place(('gpu',))}: gpu") from None
        examples = {"memory": "81559MiB", "bf16_tflops": "989", "memory_bandwidth": "3.35TB/s"}
        for key, example in examples.items():
            if key not in figures:
                self.fail(
                    ("gpu",),
                    f"`{key}` is missing in `gpu`: {form.name!r} is not in the catalog",
                    remedy=f"add `{key}: {example}`, or use a name of `topoplan gpus`",
                )
        return self._own_gpu(form), False

    def _own_gpu(self, form: GpuForm) -> Gpu:
        newest = "fp4" if form.fp4_tflops else "fp8" if form.fp8_tflops else ""
        architecture = form.architecture or _OLDEST_WITH[newest]
        known = catalog.architectures()
        is_recent = known.index(architecture) >= known.index(_PCIE_GEN5_SINCE)
        bf16 = form.bf16_tflops or 0.0
        # The links of a card that no catalog knows come from the spec; these stand in where it has one node.
        return Gpu(
            name=form.name,
            architecture=architecture,
            memory_bytes=form.memory or 0,
            memory_bytes_per_s=form.memory_bandwidth or 0.0,
            bf16_flops=bf16,
            fp16_flops=form.fp16_tflops or bf16,
            fp8_flops=form.fp8_tflops,
            fp4_flops=form.fp4_tflops,
            sm_count=form.sm_count or (132 if is_recent else 108),
            nvlink_bytes_per_s=(self.form.nvlink_bandwidth or 0.0) / 2,
            nvlink_domain_gpus=1,
            pcie_bytes_per_s=_PCIE_GEN5_BYTES_PER_S if is_recent else _PCIE_GEN4_BYTES_PER_S,
            gpus_per_node=self.form.gpus_per_node or 1,
            nics_per_node=1,
            nic_bytes_per_s=self.form.ib_bandwidth or 12.5e9,
            source=f"gpu block of {self.place(('gpu',))}",
        )

    def _nodes(self) -> int:
        form = self.form
        if form.nodes is not None:
            return form.nodes
        if form.hosts:
            return len(form.hosts)
        if not self.is_run_document:
            self.fail((), "`nodes` is missing", remedy="add `nodes: 4`")
        return 1

    def _nvlink(self, gpu: Gpu, in_catalog: bool) -> float:
        """Rate of one GPU's NVLink each way, from the vendors' figure for both ways together."""
        both_ways = self.form.nvlink_bandwidth
        if both_ways is None:
            return 0.0
        usual = gpu.nvlink_bytes_per_s * 2
        if in_catalog and not usual:
            self.fail(
                ("nvlink_bandwidth",),
                f"nvlink_bandwidth: a machine of {gpu.name} has no NVLink between all its GPUs",
                remedy="leave nvlink_bandwidth out; bridges between pairs of cards are not modelled",
            )
        # 900Gb/s is a rate that exists (a bridge between two cards), so only the card tells the mistake.
        written = str(self.raw["nvlink_bandwidth"])
        if usual and re.search("b(?!yte)", written) and math.isclose(both_ways * 8, usual, rel_tol=0.02):
            raise UnitError(
                f"nvlink_bandwidth: {written} is {format_byte_rate(both_ways)}, an eighth of the NVLink of {gpu.name}",
                where=self.place(("nvlink_bandwidth",)),
                remedy=f"did you mean {format_byte_rate(usual)}?",
            )
        return both_ways / 2

    def _fabric(self, cluster: Cluster) -> Fabric:
        form = self.form.fabric
        if form is None:
            return Fabric()
        if form.rails is not None and form.rails > cluster.nics_per_node:
            self.fail(
                ("fabric", "rails"),
                f"fabric.rails: rails {form.rails} > nics_per_node {cluster.nics_per_node}",
                expected="expected at most one rail for each NIC of a node",
            )
        if form.rails is not None and cluster.nics_per_node % form.rails:
            self.fail(
                ("fabric", "rails"),
                f"fabric.rails: nics_per_node {cluster.nics_per_node} % rails {form.rails} ="
                f" {cluster.nics_per_node % form.rails}",
                expected="expected as many NICs of a node on each rail",
            )
        given = form.given()
        for key in ("traffic_class", "service_level"):
            if key in given and form.kind not in (None, "infiniband", "roce"):
                self.fail(
                    ("fabric", key),
                    f"fabric.{key} with fabric.kind {form.kind}: NCCL gives it to InfiniBand and RoCE alone",
                    remedy="leave one of them out",
                )
        if form.uplinks_per_leaf is not None:
            given["oversubscription"] = self._oversubscription(cluster, form, given.pop("uplinks_per_leaf"))
        latency = given.pop("latency", _TCP_LATENCY_S if form.kind == "ethernet" else None)
        return Fabric(**given) if latency is None else Fabric(**given, latency_s=latency)

    def _oversubscription(self, cluster: Cluster, form: FabricForm, uplinks: int) -> float:
        """Downlinks over uplinks of a full leaf, where it has as many uplinks; 1 where it has more."""
        path = ("fabric", "uplinks_per_leaf")
        if form.oversubscription is not None:
            self.fail(path, "fabric: uplinks_per_leaf beside oversubscription", remedy="leave one of them out")
        if form.nodes_per_leaf is None:
            self.fail(path, "fabric: uplinks_per_leaf without nodes_per_leaf", remedy="add nodes_per_leaf")
        if not uplinks and cluster.nodes > form.nodes_per_leaf:
            self.fail(
                path,
                f"fabric.uplinks_per_leaf: a leaf of {form.nodes_per_leaf} nodes has no uplink, and the cluster has"
                f" {cluster.nodes} nodes",
                expected="expected uplinks where nodes are on more than one leaf",
            )
        downlinks = form.nodes_per_leaf * cluster.nics_per_node / (form.rails or 1)
        return max(1.0, downlinks / uplinks) if uplinks else 1.0

    def _hosts(self, nodes: int) -> tuple[Host, ...]:
        forms = self.form.hosts or []
        if not forms:
            return ()
        if len(forms) != nodes:
            self.fail(
                ("hosts",),
                f"hosts: {len(forms)} hosts != nodes {nodes}",
                expected="expected one host for each node, or none at all",
            )
        hosts: list[Host] = []
        seen: set[tuple[str, int]] = set()
        for index, form in enumerate(forms):
            given = form.given()
            host = Host(**{**given, "hcas": tuple(given.get("hcas", ()))})
            place = (host.address, host.port or 22)
            if place in seen:
                self.fail(("hosts", index), f"hosts[{index}]: {host.address} is listed twice")
            seen.add(place)
            hosts.append(host)
        return tuple(hosts)

    # -------------------------------------------------------------------------------------- job

    def job(self, form: JobForm, cluster: Cluster, model: Model, lengths: Lengths | None = None) -> Job:
        """The job, checked against the cluster and the model. Raises SpecError, and LayoutError for a pin."""
        pin = form.pin.given() if form.pin else {}
        given = {key: value for key, value in form.given().items() if key not in ("pin", "lengths")}
        given.setdefault("packing", given.get("stage") == "pt")
        if "lora_target" in given:
            given["lora_target"] = tuple(given["lora_target"])
        rate = usual_learning_rate(given.get("finetuning", "full"), given.get("stage", "sft"))
        given.setdefault("learning_rate", rate)
        job = Job(**given, pin=pin, lengths=lengths)
        if lengths is not None and job.samples is None:
            job = replace(job, samples=self._sequences_of(job, lengths))
        self._check_precision(job, cluster.gpu)
        self._check_something_trained(job, model)
        self._check_tuner(job, model)
        self._check_token_prediction(job, model)
        check_pin(pin, cluster, job, where=lambda key: self.place(("job", "pin", key)))
        return job

    def _sequences_of(self, job: Job, lengths: Lengths) -> int:
        """Sequences of one epoch: samples, or packed ones. The trainer's val_size is held back from them first."""
        held_back = job.trainer.get("val_size")
        rest = lengths.samples
        if isinstance(held_back, int | float) and held_back > 0:
            rest -= math.ceil(rest * held_back) if held_back < 1 else int(held_back)
        if rest > 0:
            packing = replace(job, lengths=replace(lengths, samples=rest)).packed
            rest = packing.sequences if packing else rest
        if rest < 1:
            self.fail(
                ("job", "seq_len"),
                f"job.seq_len: {lengths.samples} samples of {lengths.source} fill no sequence of {job.seq_len} tokens",
                remedy="lower seq_len, or take more data",
            )
        return rest

    def _check_precision(self, job: Job, gpu: Gpu) -> None:
        rates = {"fp8": gpu.fp8_flops, "mxfp8": gpu.fp8_flops, "nvfp4": gpu.fp4_flops}
        # Run documents describe runs that happened, and some call Hopper's block-scaled fp8 mxfp8.
        has_mx = gpu.architecture == "blackwell" or self.is_run_document
        usable = [
            name
            for name in ("bf16", "fp16", "fp8", "mxfp8", "nvfp4")
            if rates.get(name, 1.0) and (name != "mxfp8" or has_mx)
        ]
        if job.precision not in usable:
            self.fail(
                ("job", "precision"),
                f"job.precision: {gpu.name} ({gpu.architecture}) does not compute in {job.precision}",
                expected=f"expected {', '.join(usable[:-1])} or {usable[-1]}",
            )

    def _check_something_trained(self, job: Job, model: Model) -> None:
        frozen = job.freeze_language_model and (
            model.vision is None or (job.freeze_vision_tower and job.freeze_multi_modal_projector)
        )
        if frozen and job.finetuning in ("full", "freeze"):
            self.fail(
                ("job", "freeze_language_model"),
                "job.freeze_language_model: everything is frozen, so nothing would be trained",
                remedy="leave it out" if model.vision is None else "set one of the freeze_ keys to false",
            )

    def _check_tuner(self, job: Job, model: Model) -> None:
        if job.quantization_bit not in (None, 4, 8):
            bits = f"job.quantization_bit: {job.quantization_bit}"
            self.fail(("job", "quantization_bit"), bits, expected="expected 4 or 8")
        layers = abs(job.freeze_trainable_layers)
        if job.finetuning == "freeze" and not 1 <= layers <= model.num_layers:
            self.fail(
                ("job", "freeze_trainable_layers"),
                f"job.freeze_trainable_layers: {job.freeze_trainable_layers} of {model.num_layers} layers",
                expected=f"expected 1 to {model.num_layers}, or -1 to -{model.num_layers}",
            )

    def _check_token_prediction(self, job: Job, model: Model) -> None:
        count = job.mtp_num_layers
        if not count:
            return
        path, key = ("job", "mtp_num_layers"), f"job.mtp_num_layers: {job.mtp_num_layers}"
        if 0 < model.mtp_layers < count:
            self.fail(
                path,
                f"{key} > {model.mtp_layers} multi-token-prediction layers of {model.name}",
                expected=f"expected at most {model.mtp_layers}",
            )
        if model.learned_positions:
            # Megatron-LM `training/arguments.py`: rotary positions or none.
            self.fail(path, f"{key}: {model.name} has learned positions, and Megatron's layers need rotary ones")
        if job.stage == "dpo":
            # `core/models/gpt/gpt_model.py::_postprocess` clones the labels, which DPO keeps to itself.
            self.fail(path, f"{key}: Megatron's layers take their loss from labels, which stage dpo has none of")


def relocated(error: InputError, where: str) -> InputError:
    """The same error with a place in front."""
    return type(error)(str(error), where=where)


def _with_figures(gpu: Gpu, form: GpuForm) -> Gpu:
    """A catalog GPU with the figures that a block gives in place of the catalog's."""
    names = {
        "memory": "memory_bytes",
        "memory_bandwidth": "memory_bytes_per_s",
        "bf16_tflops": "bf16_flops",
        "fp16_tflops": "fp16_flops",
        "fp8_tflops": "fp8_flops",
        "fp4_tflops": "fp4_flops",
        "architecture": "architecture",
        "sm_count": "sm_count",
    }
    given = form.given()
    changes: dict[str, Any] = {field: given[key] for key, field in names.items() if key in given}
    return replace(gpu, **changes) if changes else gpu


def _nvlink_domain(gpu: Gpu, nvlink_bytes_per_s: float, nodes: int, gpus_per_node: int) -> int:
    """GPUs that reach each other over NVLink: a box, or in an NVL72 rack up to all of its boxes."""
    if not nvlink_bytes_per_s:
        return 1
    is_rack = gpu.nvlink_domain_gpus > gpu.gpus_per_node
    return min(max(gpu.nvlink_domain_gpus, gpus_per_node), nodes * gpus_per_node) if is_rack else gpus_per_node


def check_pin(pin: Mapping[str, Any], cluster: Cluster, job: Job, *, where: Callable[[str], str]) -> None:
    """Raise LayoutError, with its equation, for a pin that no layout of this cluster and batch could meet."""

    def fail(key: str, what: str, remedy: str = "") -> NoReturn:
        raise LayoutError(f"pin: {what}", where=where(key), remedy=remedy)

    def product(keys: tuple[str, ...]) -> tuple[int, str, str]:
        """Value, equation and last key of the product of those keys that are pinned."""
        pinned = [key for key in keys if key in pin]
        equation = " * ".join(f"{key} {pin[key]}" for key in pinned)
        return math.prod(pin[key] for key in pinned), equation, pinned[-1] if pinned else ""

    def must_divide(keys: tuple[str, ...], total: int, total_words: str, *, is_whole: bool) -> None:
        value, equation, key = product(keys)
        if not key:
            return
        if is_whole and all(key in pin for key in keys) and value != total:
            fail(key, f"{equation} = {value} != {total_words}", f"change one of them, or leave {keys[-1]} out")
        if total % value:
            rest = f"= {total % value}" if " * " not in equation else f"({value}) = {total % value}"
            fail(key, f"{total_words} % ({equation}) {rest}", f"expected a divisor of {total}")

    domain = max(cluster.nvlink_domain_gpus, cluster.gpus_per_node)
    if pin.get("tp", 1) > domain:
        kind = "the NVLink domain" if cluster.nvlink_domain_gpus >= cluster.gpus_per_node else "one node"
        fail("tp", f"tp {pin['tp']} > {domain} GPUs of {kind}", f"expected tp of at most {domain}")
    gpus = cluster.world_size
    gpus_words = f"{gpus} GPUs ({cluster.nodes} nodes * {cluster.gpus_per_node})"
    must_divide(("tp", "pp", "cp", "dp"), gpus, gpus_words, is_whole=True)
    must_divide(("etp", "ep", "pp"), gpus, gpus_words, is_whole=False)
    batch_keys = ("dp", "micro_batch_size", "gradient_accumulation_steps")
    batch = job.global_batch_size
    must_divide(batch_keys, batch, f"global_batch_size {batch}", is_whole=True)
    if pin.get("vpp", 1) > 1 and pin.get("pp") == 1:
        fail("vpp", f"vpp {pin['vpp']} > 1 with pp 1", "a virtual pipeline needs pp of at least 2")
    if pin.get("sequence_parallel") and pin.get("tp") == 1:
        fail("sequence_parallel", "sequence_parallel with tp 1", "it splits along the TP group: needs tp of at least 2")
    if pin.get("overlap_param_gather") and pin.get("distributed_optimizer") is False:
        fail("overlap_param_gather", "overlap_param_gather without distributed_optimizer", "leave one of them out")
    _check_recompute(pin.get("recompute", {}), lambda what: fail("recompute", what))


def _check_recompute(recompute: Mapping[str, Any], fail: Callable[[str], None]) -> None:
    granularity = recompute.get("granularity")
    if "modules" in recompute and granularity not in (None, "selective"):
        fail(f"recompute.modules with granularity {granularity}; modules go with selective")
    for key in ("method", "num_layers"):
        if key in recompute and granularity not in (None, "full"):
            fail(f"recompute.{key} with granularity {granularity}; {key} goes with full")
    if "modules" in recompute and ("method" in recompute or "num_layers" in recompute):
        fail("recompute.modules goes with selective, method and num_layers go with full")
