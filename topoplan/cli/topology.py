"""`topoplan topology`: a picture of the machines and the network, and the links that a layout's groups use."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

from topoplan.cli.completion import plans
from topoplan.cli.options import AsJson, NoCache, SpecOptions, SpecPath, not_both, option
from topoplan.cli.output import print_json, stdout_console, write_and_tell
from topoplan.cli.plan_choice import plans_of_spec
from topoplan.errors import InputError, LayoutError, OutputError, nearest

if TYPE_CHECKING:
    from collections.abc import Sequence

    from topoplan.layout.layout import Layout
    from topoplan.planner.communication import GroupLinks, StepFlow
    from topoplan.specs.cluster import Cluster


def topology(
    spec: SpecPath,
    layout: Annotated[
        str | None,
        option("--layout KEY=N,...", "Degrees of a layout, such as tp=4,pp=2, or ulysses=4: what its groups cross."),
    ] = None,
    plan: Annotated[
        str | None,
        option(
            "--plan N|ID", "The same for a plan of the ranking, by its place or id, with the bytes of a step.", plans
        ),
    ] = None,
    output: Annotated[
        str | None,
        option("--output -o FILE", "Write a drawing (SVG) to a file, with the groups of the layout or plan."),
    ] = None,
    *,
    options: Annotated[SpecOptions, ("model", "job", "overrides", "pin", "backend", "trainer")],
    as_json: AsJson = False,
    no_cache: NoCache = False,
) -> None:
    """With a layout, also shows what each of its communication groups gets of the network.

    The spec needs neither model nor job, except for --plan. Exit code 2: bad input.
    """
    from topoplan.planner.communication import group_links, step_flows

    not_both("--output", output is not None, "--json", as_json)
    if output is not None and not output.endswith(".svg"):
        raise OutputError("not the name of a drawing", where=output, expected="expected a name in .svg")
    not_both("--layout", layout is not None, "--plan", plan is not None)
    chosen: Layout | None
    flows: Sequence[StepFlow] = ()
    if plan is not None:
        read = options.read(spec)
        (found,) = plans_of_spec(read, {"--plan": plan}, fresh=no_cache)
        cluster, chosen = read.cluster, found.layout
        rows = group_links(cluster, found.layout, read.profile)
        flows = step_flows(read, found, rows)
    else:
        cluster = _cluster(spec, options)
        chosen = None if layout is None else _of_degrees(layout, cluster)
        rows = () if chosen is None else group_links(cluster, chosen, None)
    if as_json:
        from topoplan.report.topology import topology_to_dict

        print_json(topology_to_dict(cluster, chosen, rows, flows))
        return
    _draw(cluster, output, chosen, rows, flows)
    if chosen is not None:
        from topoplan.report.topology import print_groups, print_step_flows

        print_groups(stdout_console(), chosen, rows)
        print_step_flows(stdout_console(), flows)


def _cluster(spec: str, options: SpecOptions) -> Cluster:
    from topoplan.specs.load import load_cluster

    if replace(options, overrides=None):
        words = "--model, --job, --pin, --backend and --trainer go with --plan"
        raise InputError(words, remedy="leave them out")
    return load_cluster(spec, overrides=tuple(options.overrides or ()))


def _draw(
    cluster: Cluster, output: str | None, layout: Layout | None, rows: Sequence[GroupLinks], flows: Sequence[StepFlow]
) -> None:
    if output is None:
        from topoplan.report.topology import print_topology

        print_topology(stdout_console(), cluster)
        return

    from topoplan.report.topology_drawing import MARK, topology_svg

    write_and_tell(output, topology_svg(cluster, layout, rows, flows), mark=MARK, writer="topoplan topology")


def _of_degrees(text: str, cluster: Cluster) -> Layout:
    """Return the layout of `tp=4,pp=2`; missing degrees are 1, and dp is what is left. Raises LayoutError."""
    from topoplan.layout.layout import Layout

    known = ("tp", "pp", "cp", "ep", "etp", "dp", "ulysses")
    degrees: dict[str, int] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        key, equals, value = (word.strip() for word in part.partition("="))
        if key not in known:
            raise LayoutError(
                f"unknown degree {key!r}",
                where="--layout",
                expected=f"expected {', '.join(known)}",
                remedy=nearest(key, known),
            )
        if not equals or not value.isdecimal() or not 1 <= int(value) <= cluster.world_size:
            raise LayoutError(
                f"{part!r} is not a degree",
                where="--layout",
                expected=f"expected {key}=N with N from 1 to {cluster.world_size}",
            )
        if degrees.setdefault(key, int(value)) != int(value):
            raise LayoutError(f"{key} is {degrees[key]} and {value}", where="--layout", remedy="keep one of them")
    if ulysses := degrees.get("ulysses"):
        return _of_ulysses(degrees, ulysses, cluster)
    tp, pp, cp, ep, etp = (degrees.get(key, 1) for key in ("tp", "pp", "cp", "ep", "etp"))
    product, words, world = tp * pp * cp, f"tp {tp} * pp {pp} * cp {cp}", cluster.world_size
    if world % product:
        raise LayoutError(f"world size {world} % ({words}) = {world % product}", where="--layout")
    dp = degrees.get("dp", world // product)
    if product * dp != world:
        raise LayoutError(f"{words} * dp {dp} = {product * dp} != world size {world}", where="--layout")
    stage = world // pp
    if stage % (ep * etp):
        raise LayoutError(f"{stage} GPUs of a stage % (ep {ep} * etp {etp}) = {stage % (ep * etp)}", where="--layout")
    return Layout.of(tp=tp, pp=pp, cp=cp, dp=dp, ep=ep, etp=etp)


def _of_ulysses(degrees: dict[str, int], ulysses: int, cluster: Cluster) -> Layout:
    """Return an fsdp2 layout, which has the same groups as deepspeed. Raises LayoutError."""
    from topoplan.layout.layout import Layout

    other = next((key for key, value in degrees.items() if key not in ("dp", "ulysses") and value > 1), None)
    if other is not None:
        raise LayoutError(
            f"{other} {degrees[other]} with ulysses",
            where="--layout",
            expected="expected ulysses and dp alone: the backends that have it split nothing else",
        )
    world = cluster.world_size
    if world % ulysses or degrees.get("dp", world // ulysses) * ulysses != world:
        dp = degrees.get("dp")
        words = f"ulysses {ulysses}{f' * dp {dp}' if dp else ''}"
        raise LayoutError(f"world size {world} is not divided by {words}", where="--layout")
    return Layout.of(backend="fsdp2", ulysses=ulysses, dp=world // ulysses)
