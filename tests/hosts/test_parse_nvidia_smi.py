import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.hosts.machines import MACHINES, recorded
from topoplan.hosts.parse_nvidia_smi import (
    parse_driver,
    parse_gpus,
    parse_nvlink,
    parse_processes,
    parse_topology,
    pci_address,
    with_nvlink,
)

MIB = 2**20


class TestParseGpus:
    def test_reads_a_dgx_h100(self) -> None:
        gpus = parse_gpus(recorded("dgx-h100", "gpus.csv"))
        assert [gpu.index for gpu in gpus] == list(range(8))
        first = gpus[0]
        assert (first.name, first.memory_bytes, first.memory_used_bytes) == ("NVIDIA H100 80GB HBM3", 81559 * MIB, MIB)
        assert first.pci_bus == "0000:1b:00.0"
        assert first.uuid.startswith("GPU-")
        assert first.utilization == 0
        assert not first.mig
        # Generation 5, 16 lanes of 32 GT/s at 128b/130b.
        assert first.pcie_bytes_per_s == pytest.approx(16 * 32e9 / 8 * 128 / 130)

    def test_reads_every_recorded_machine(self) -> None:
        for machine in MACHINES:
            gpus = parse_gpus(recorded(machine, "gpus.csv"))
            assert gpus, machine
            assert all(gpu.memory_bytes and gpu.pci_bus and gpu.pcie_bytes_per_s for gpu in gpus), machine
            assert parse_driver(recorded(machine, "gpus.csv")).count(".") >= 1

    def test_knows_mig_and_values_that_may_not_be_read(self) -> None:
        cut, whole = parse_gpus(recorded("a100-mig", "gpus.csv"))
        assert cut.mig
        assert not whole.mig
        assert cut.memory_used_bytes is None
        assert cut.utilization is None

    def test_reads_a_driver_that_knows_no_mig(self) -> None:
        gpus = parse_gpus(recorded("titan-old-driver", "gpus.csv"))
        assert len(gpus) == 8
        assert not any(gpu.mig for gpu in gpus)

    @pytest.mark.parametrize("machine", ["driver-mismatch", "no-devices"])
    def test_finds_no_cards_in_an_error(self, machine: str) -> None:
        assert parse_gpus(recorded(machine, "gpus.csv")) == ()
        assert parse_driver(recorded(machine, "gpus.csv")) == ""

    def test_passes_over_a_card_that_fell_off_the_bus(self) -> None:
        text = recorded("rtx4090-pcie", "gpus.csv")
        lost = "Unable to determine the device handle for GPU0000:51:00.0: Unknown Error"
        lines = text.splitlines()
        assert len(parse_gpus("\n".join([lines[0], lost, *lines[2:]]))) == 7

    @given(st.text(max_size=200))
    def test_never_raises(self, text: str) -> None:
        parse_gpus(text)
        parse_gpus(recorded("a100-mig", "gpus.csv") + text)
        parse_driver(text)
        parse_processes(text)
        parse_nvlink(text)
        pci_address(text)
        parse_topology(text)
        parse_topology("\tGPU0\tGPU1\tCPU Affinity\nGPU0" + text)


class TestParseProcesses:
    def test_joins_what_nvidia_smi_and_ps_say(self) -> None:
        python, nameless, commas = parse_processes(recorded("processes", "processes.csv"))
        assert (python.pid, python.user, python.age_s) == (412345, "alice", 86523)
        assert python.memory_bytes == 73126 * MIB
        assert python.name == "/opt/venv/bin/python"
        assert (nameless.memory_bytes, nameless.name, nameless.user) == (None, "", "")
        assert commas.name == "my job, with commas"
        assert commas.user == "root"

    def test_finds_none_on_idle_cards(self) -> None:
        assert parse_processes(recorded("dgx-h100", "processes.csv")) == ()


class TestParseNvlink:
    @pytest.mark.parametrize(
        ("machine", "links", "gb_per_s"), [("dgx-h100", 18, 450), ("dgx-a100", 12, 300), ("hgx-b200", 18, 900)]
    )
    def test_gives_the_rate_that_vendors_quote(self, machine: str, links: int, gb_per_s: float) -> None:
        found = parse_nvlink(recorded(machine, "nvlink.txt"))
        assert set(found.values()) == {(links, gb_per_s * 1e9)}
        assert len(found) == 8

    def test_counts_only_active_links(self) -> None:
        found = parse_nvlink(recorded("b200-broken-nvlink", "nvlink.txt"))
        assert found[2] == (0, 0.0)
        assert found[3] == (18, 900e9)

    def test_leaves_a_rate_that_no_vendor_quotes(self) -> None:
        assert parse_nvlink("GPU 0: NVIDIA RTX A6000 (UUID: GPU-1)\n\t Link 0: 14.062 GB/s\n") == {0: (1, 14.062e9)}

    def test_is_laid_over_the_cards(self) -> None:
        gpus = with_nvlink(parse_gpus(recorded("dgx-h100", "gpus.csv")), {1: (18, 450e9)})
        assert [gpu.nvlink_count for gpu in gpus[:3]] == [None, 18, None]


@pytest.mark.parametrize(
    ("written", "address"),
    [
        ("00000000:1B:00.0", "0000:1b:00.0"),
        ("0000:1B:00.0", "0000:1b:00.0"),
        ("00000018:01:00.0", "0018:01:00.0"),
        ("?", ""),
    ],
)
def test_a_bus_id_becomes_that_of_sysfs(written: str, address: str) -> None:
    assert pci_address(written) == address


def test_a_dgx_h100_has_nics_by_their_names() -> None:
    links, numa_nodes = parse_topology(recorded("dgx-h100", "topology.txt"))
    assert links["GPU0", "GPU7"] == "NV18"
    assert links["GPU3", "mlx5_5"] == links["mlx5_5", "GPU3"] == "PXB"
    assert links["mlx5_1", "mlx5_2"] == "PIX"
    assert links["GPU0", "mlx5_11"] == "SYS"
    assert numa_nodes == {**dict.fromkeys(range(4), 0), **dict.fromkeys(range(4, 8), 1)}
    assert not any("NIC" in device for pair in links for device in pair)


@pytest.mark.parametrize("machine", MACHINES)
def test_every_matrix_is_whole_and_symmetric(machine: str) -> None:
    links, _ = parse_topology(recorded(machine, "topology.txt"))
    devices = {device for pair in links for device in pair}
    assert len(links) == len(devices) * (len(devices) - 1)
    assert all(links[two, one] == link for (one, two), link in links.items())


def test_columns_that_run_together_are_told_apart() -> None:
    text = recorded("hgx-b200", "topology.txt")
    assert "SYSSYS" in text
    links, _ = parse_topology(text)
    assert links["GPU0", "mlx5_15"] == "SYS"
    assert links["GPU0", "mlx5_4"] == "PIX"


def test_an_old_driver_names_the_nic_in_its_column() -> None:
    links, numa_nodes = parse_topology(recorded("titan-old-driver", "topology.txt"))
    assert links["GPU4", "mlx5_0"] == "PHB"
    assert numa_nodes == {}


def test_the_first_memory_of_a_grace_cpu_is_its_own() -> None:
    assert parse_topology(recorded("gb200-tray", "topology.txt"))[1] == {0: 0, 1: 0, 2: 1, 3: 1}


def test_a_row_that_is_cut_is_left_out() -> None:
    text = "\tGPU0\tGPU1\tCPU Affinity\nGPU0\t X \tPHB\t0-7\nGPU1\tPHB\n"
    assert parse_topology(text)[0] == {("GPU0", "GPU1"): "PHB"}
