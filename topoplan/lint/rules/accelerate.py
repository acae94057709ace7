"""Rules on the configuration file of `accelerate launch` and the options that override it.

Sources, at accelerate 1.15: `commands/config/config_args.py`, `commands/launch.py` (_validate_launch_command),
`utils/launch.py` (prepare_multi_gpu_env), `utils/dataclasses.py` (FullyShardedDataParallelPlugin, DeepSpeedPlugin).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from topoplan.catalog import key_list
from topoplan.errors import nearest
from topoplan.reading.finding import Finding
from topoplan.reading.launch_facts import LAST_PORT, certain_count, from_outside, is_port
from topoplan.reading.processes import launch_of
from topoplan.reading.rules import read_rules
from topoplan.reading.setup import Configuration, Launch, Setup
from topoplan.reading.values import as_number, as_whole, at, flag, number
from topoplan.specs.model import Model
from topoplan.specs.source import KeyPath
from topoplan.trainers.around import context_of
from topoplan.trainers.models import model_at_hand
from topoplan.trainers.relations import read_relations
from topoplan.units import shown

RULES = read_rules(__package__, "accelerate.toml")

_RELATIONS = read_relations("topoplan.trainers", "accelerate.toml")
_KINDS = ("cpu", "multi_gpu", "tpu", "use_deepspeed", "use_fsdp")

_EXACT = ("distributed_type",)
"""Keys whose value has to be written as it is listed: config_args.py looks it up as it stands."""
_FSDP, _DEEPSPEED = "fsdp_config", "deepspeed_config"
_CLIPPING = "max_grad_norm"
_BLOCK_OF = {_FSDP: "FSDP", _DEEPSPEED: "DEEPSPEED"}
_OF_A_FILE = "deepspeed_config_file"
_BESIDE_A_FILE = (
    *("gradient_accumulation_steps", "gradient_clipping", "zero_stage", "zero3_save_16bit_model"),
    *("offload_optimizer_device", "offload_param_device", "offload_optimizer_nvme_path", "offload_param_nvme_path"),
)
"""Keys that belong in the DeepSpeed file if one is named (DeepSpeedPlugin._deepspeed_config_checks)."""


def findings(setup: Setup) -> Iterator[Finding]:
    """Report faults in accelerate's files."""
    told = list(setup.of("accelerate"))
    launches = [launch for launch in setup.launches if launch.starter == "accelerate"]
    for launch in launches:
        if len(kinds := [one for one in _KINDS if one in launch.options]) > 1:
            yield RULES["accelerate-refused-together.options"].on(
                launch, launch.options[kinds[1]], first=kinds[0], second=kinds[1]
            )
    trained = next((one.trainer for one in _trainers(setup)), None)
    for configuration in told:
        own = [launch for launch in launches if launch.starter_file is configuration]
        yield from _keys(configuration)
        yield from _machines(configuration, own)
        yield from _blocks(configuration)
        yield from _fsdp(configuration)
        yield from _RELATIONS.findings(
            RULES["accelerate-refused-together"],
            configuration,
            {**context_of(setup, configuration), "is_piece": False, "trains": trained},
            unwise=RULES["accelerate-refused-together.unwise"],
        )
        for trainer in _trainers(setup) if len(told) == 1 else ():
            yield from _with_trainer(setup, configuration, trainer)


def _trainers(setup: Setup) -> Iterator[Configuration]:
    """Yield the configurations that `accelerate launch` starts."""
    for one in setup.configurations:
        launch = launch_of(setup, one) if setup.model_key(one) else None
        if launch is not None and launch.starter == "accelerate":
            yield one


# Keys and values ------------------------------------------------------------------------------------------------------


def _keys(configuration: Configuration) -> Iterator[Finding]:
    known, data = key_list("accelerate"), configuration.source.data
    for key in data:
        if key in known["gone"]:
            yield RULES["accelerate-removed-key"].at(configuration, key, until=known["gone"][key])
        elif key not in known["top"]:
            remedy = nearest(str(key), known["top"])
            yield RULES["accelerate-unknown-key"].at(configuration, key, name=shown(key), remedy=remedy)
    if "distributed_type" not in data:
        yield RULES["accelerate-unknown-key.type"].at(configuration, None)
    for block, names in known["blocks"].items():
        prefix = "fsdp_" if block == _FSDP else ""
        for key in at(data, (block,)) or () if isinstance(data.get(block), Mapping) else ():
            if str(key).removeprefix(prefix) not in names:
                rule = RULES["accelerate-unknown-key.block"]
                remedy = nearest(str(key), [f"{prefix}{name}" for name in names])
                yield rule.at(configuration, (block, key), block=block, name=shown(key), remedy=remedy)
    for place in known["choices"]:
        yield from _choice(configuration, place)


def _choice(configuration: Configuration, place: str) -> Iterator[Finding]:
    block, _, name = place.rpartition(".")
    path, value = _setting(configuration, block, name)
    choices: list[str] = key_list("accelerate")["choices"][place]
    text = str(value)
    if value is None or (isinstance(value, bool) and name == "mixed_precision"):
        return  # a bare `no` is read as False
    if text not in choices if name in _EXACT else text.upper() not in [choice.upper() for choice in choices]:
        close = nearest(text.upper(), choices) or nearest(text.lower(), choices)
        yield RULES["accelerate-wrong-value"].at(
            configuration, path, value=shown(value), choices=", ".join(choices), close=f"; {close}" if close else ""
        )


def _setting(configuration: Configuration, block: str, name: str) -> tuple[KeyPath, Any]:
    """Return the path and value of a setting in a block; FSDP's settings may have the prefix fsdp_."""
    paths: list[KeyPath] = [(block, f"fsdp_{name}"), (block, name)] if block == _FSDP else [(block, name)]
    if not block:
        paths = [(name,)]
    for path in paths:
        if (value := at(configuration.source.data, path)) is not None:
            return path, value
    return paths[0], None


# Machines -------------------------------------------------------------------------------------------------------------


def _machines(configuration: Configuration, launches: list[Launch]) -> Iterator[Finding]:
    machines, processes = (_count(configuration, launches, key) for key in ("num_machines", "num_processes"))
    port = configuration.get("main_process_port")
    address = str(configuration.get("main_process_ip") or "")
    if ":" in address and address.count(":") < 2:
        yield RULES["accelerate-wrong-value"].at(
            configuration, "main_process_ip", value=shown(address), choices="an address without a port", close=""
        )
    if port is not None and not is_port(str(port)):
        yield RULES["accelerate-wrong-value"].at(
            configuration, "main_process_port", value=shown(port), choices=f"0 to {LAST_PORT}", close=""
        )
    options = {name for launch in launches for name in launch.options}
    rank = as_whole(configuration.get("machine_rank"))
    if machines is None or machines < 2:
        return
    if processes is not None and processes > 0 and processes % machines:
        each, started = processes // machines, processes // machines * machines
        yield RULES["accelerate-processes"].at(
            configuration, "num_processes", machines=machines, processes=processes, each=each, started=started
        )
    if rank is not None and rank >= machines and "machine_rank" not in options:
        yield RULES["accelerate-rank"].at(
            configuration, "machine_rank", rank=rank, machines=machines, last=machines - 1
        )
    for launch in launches:
        rank = certain_count(launch.options.get("machine_rank"))
        if rank is not None and rank >= machines:
            yield RULES["accelerate-rank"].on(
                launch, launch.options["machine_rank"], rank=rank, machines=machines, last=machines - 1
            )
    launcher = at(configuration.source.data, (_DEEPSPEED, "deepspeed_multinode_launcher"))
    by_ssh = configuration.get("distributed_type") == "DEEPSPEED" and launcher != "standard"
    is_said = configuration.get("main_process_ip") or options & {"main_process_ip", "rdzv_conf"}
    if launches and not is_said and not by_ssh and not any(map(from_outside, launches)):
        yield RULES["accelerate-no-address"].at(configuration, "num_machines", machines=machines)


def _count(configuration: Configuration, launches: list[Launch], key: str) -> int | None:
    """Return a number from the file, or from the option of the only launch, which overrides it."""
    option = launches[0].options.get(key) if len(launches) == 1 else None
    if option is None:
        return None if any(key in launch.options for launch in launches) else as_whole(configuration.get(key))
    return certain_count(option)


# Blocks ---------------------------------------------------------------------------------------------------------------


def _blocks(configuration: Configuration) -> Iterator[Finding]:
    kind, data = str(configuration.get("distributed_type")), configuration.source.data
    for block, reader in _BLOCK_OF.items():
        if isinstance(data.get(block), Mapping) and data[block] and kind != reader:
            yield RULES["accelerate-unused-block"].at(configuration, block, kind=kind, reader=reader)
    held = data.get(_DEEPSPEED)
    if kind != "DEEPSPEED" or not isinstance(held, Mapping) or not held.get(_OF_A_FILE):
        return
    beside: list[KeyPath] = [(_DEEPSPEED, key) for key in _BESIDE_A_FILE if key in held]
    if data.get("mixed_precision") is not None:
        beside.append(("mixed_precision",))
    for path in beside:
        yield RULES["accelerate-beside-deepspeed-file"].at(configuration, path, file=held[_OF_A_FILE])


def _fsdp(configuration: Configuration) -> Iterator[Finding]:
    if configuration.get("distributed_type") != "FSDP":
        return

    def value(name: str) -> Any:
        return _setting(configuration, _FSDP, name)[1]

    version = as_whole(value("version")) or 1
    path, synchronised = _setting(configuration, _FSDP, "sync_module_states")
    if synchronised is False and value("cpu_ram_efficient_loading"):
        yield RULES["accelerate-fsdp-sync"].at(configuration, path)
    path, reshards = _setting(configuration, _FSDP, "reshard_after_forward")
    if version == 2 and isinstance(reshards, str) and reshards.lower() not in ("true", "false"):
        yield RULES["accelerate-fsdp-version.reshard"].at(configuration, path, value=shown(reshards))
    path, saves = _setting(configuration, _FSDP, "state_dict_type")
    if version == 2 and str(saves).upper() == "LOCAL_STATE_DICT":
        yield RULES["accelerate-fsdp-version.states"].at(configuration, path)
    path, offloads = _setting(configuration, _FSDP, "activation_checkpointing_offload")
    if offloads and not (value("activation_checkpointing") and version == 2):
        yield RULES["accelerate-fsdp-version.activations"].at(configuration, path)


# With the trainer's own file ------------------------------------------------------------------------------------------


def _with_trainer(setup: Setup, configuration: Configuration, trainer: Configuration) -> Iterator[Finding]:
    launch = launch_of(setup, trainer)
    given = launch.options.get("mixed_precision") if launch else None
    told = given.value if given else configuration.get("mixed_precision")
    other = {"fp16": "bf16", "bf16": "fp16"}.get(str(told))
    if other and flag(trainer, other) and not flag(trainer, str(told)):
        yield RULES["accelerate-other-precision"].at(
            configuration, "mixed_precision", told=told, other=other, file=trainer.part.name
        )
    if configuration.get("distributed_type") == "DEEPSPEED":
        yield from _other_values(configuration, trainer)
    if configuration.get("distributed_type") != "FSDP":
        return
    if model := model_at_hand(trainer.get(setup.model_key(trainer)), trainer.part):
        yield from _layers(setup, configuration, model)
    checkpoints = _setting(configuration, _FSDP, "activation_checkpointing")[1]
    if checkpoints is True and flag(trainer, "gradient_checkpointing"):
        yield RULES["accelerate-two-checkpointings"].at(trainer, "gradient_checkpointing", file=configuration.part.name)


def _other_values(configuration: Configuration, trainer: Configuration) -> Iterator[Finding]:
    """Report values that HfTrainerDeepSpeedConfig would find in conflict with the trainer's arguments."""
    for key, name in (("gradient_accumulation_steps", "gradient_accumulation_steps"), ("gradient_clipping", _CLIPPING)):
        value, given = at(configuration.source.data, (_DEEPSPEED, key)), number(trainer, name)
        if as_number(value) is not None and given is not None and given != value:
            yield RULES["accelerate-other-value"].at(
                configuration, (_DEEPSPEED, key), value=value, name=name, given=f"{given:g}", file=trainer.part.name
            )


def _layers(setup: Setup, configuration: Configuration, model: Model) -> Iterator[Finding]:
    """Report a layer class of another model; a class that this model has besides its layers is not a mistake."""
    path, written = _setting(configuration, _FSDP, "transformer_layer_cls_to_wrap")
    options = [(one, one.options.get("fsdp_transformer_layer_cls_to_wrap")) for one in setup.launches]
    told = [(launch, option) for launch, option in options if launch.starter == "accelerate" and option is not None]
    for launch, option in told:
        for name, own in _layers_of_others(option.value, model):
            yield RULES["accelerate-wrong-layer"].on(launch, option, name=shown(name), model=model.name, own=own)
    for name, own in _layers_of_others(written, model) if not told else ():
        yield RULES["accelerate-wrong-layer"].at(configuration, path, name=shown(name), model=model.name, own=own)


def _layers_of_others(written: Any, model: Model) -> Iterator[tuple[str, str]]:
    """Yield each class that is another model's, or misspelled, with the classes of this model."""
    layers: Mapping[str, str] = key_list("accelerate")["layers"]
    own = layers.get(model.model_type, "").split()
    others = {name for names in layers.values() for name in names.split()} - set(own)
    names = written if isinstance(written, list) else str(written or "").split(",")
    for name in [str(one).strip() for one in names]:
        if own and (name in others or (name not in own and nearest(name, own))):
            yield name, ", ".join(own)
