"""Devices by name: what their makers say of speed, memory and links.

Peaks are for dense products (data sheets print twice as much, "with sparsity"). Links are one
device's, in one direction. A device does not reach its peak: ``efficiency`` is the share that a
training step's products are taken to reach, a stated assumption that can be set. 0.4 is in the
middle of what large runs report (0.38 to 0.43 for Llama 3 on up to 16 384 H100: "The Llama 3 Herd
of Models", 2024, table 4; 0.46 for PaLM on TPU v4: Chowdhery et al. 2022).
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType

from quietgrad.clipping.norms.cost import Throughput

GB = 10**9


@dataclass(frozen=True)
class Device:
    """One kind of device.

    Attributes:
        name: how it is asked for.
        peak: floating-point operations per second of products in bfloat16 (``cpu``: float32).
        peak_float32: the same in float32, without tensor cores' shorter formats.
        memory: bytes.
        bandwidth: bytes per second of its memory.
        link: bytes per second to devices of the same machine, one direction.
        network: bytes per second to other machines, one direction.
        per_machine: devices of one machine.
        source: where the numbers are from; what is assumed says so.
        kind: "cuda" or "cpu".
        dtype: what weights are trained in here.
    """

    name: str
    peak: float
    peak_float32: float
    memory: float
    bandwidth: float
    link: float
    network: float
    per_machine: int
    source: str
    kind: str = "cuda"
    dtype: str = "bfloat16"

    def throughput(self, efficiency: float) -> Throughput:
        """The planner's speeds: multiplications are half of the operations; batched products of
        small matrices run at two fifths of that, as in the planner's own stated speeds.
        """
        large = self.peak * efficiency / 2
        on_gpu = self.kind == "cuda"
        return Throughput(
            large,
            0.4 * large if on_gpu else 0.5 * large,
            self.bandwidth / 4,
            1e-5 if on_gpu else 2e-5,
            1024.0 if on_gpu else 48.0,
        )

    def link_for(self, devices: int) -> float:
        """Bytes per second of the slowest link of a ring over so many."""
        return self.link if devices <= self.per_machine else self.network


_H100 = "NVIDIA H100 Tensor Core GPU datasheet (SXM)"
_A100 = "NVIDIA A100 Tensor Core GPU datasheet (SXM)"
_DGX_H = "network: one 400 Gb/s adapter a GPU (DGX H100 datasheet)"
_DGX_A = "network: one 200 Gb/s adapter a GPU (DGX A100 datasheet)"
_ALL = (
    Device(
        "h100-80gb",
        *(989e12, 67e12, 80 * GB, 3.35e12, 450e9, 50e9, 8),
        source=f"{_H100}; {_DGX_H}",
    ),
    Device(
        "h200",
        *(989e12, 67e12, 141 * GB, 4.8e12, 450e9, 50e9, 8),
        source="NVIDIA H200 Tensor Core GPU datasheet (SXM); network: one 400 Gb/s adapter a GPU "
        "(DGX H200 datasheet)",
    ),
    Device(
        "a100-80gb",
        *(312e12, 19.5e12, 80 * GB, 2.039e12, 300e9, 25e9, 8),
        source=f"{_A100}; {_DGX_A}",
    ),
    Device(
        "a100-40gb",
        *(312e12, 19.5e12, 40 * GB, 1.555e12, 300e9, 25e9, 8),
        source=f"{_A100}; {_DGX_A}",
    ),
    Device(
        "l4",
        *(121e12, 30.3e12, 24 * GB, 300e9, 32e9, 12.5e9, 8),
        source="NVIDIA L4 Tensor Core GPU datasheet (PCIe Gen4 x16, 64 GB/s both ways); network: "
        "100 Gb/s a GPU, an assumption",
    ),
    # One core: what a process with one thread has.
    Device(
        "cpu",
        *(2e11, 2e11, 8 * GB, 10e9, 1e9, 1e9, 2),
        source="the planner's stated speeds of a processor (clipping/norms/cost.py), one thread a "
        "process; 8 GB a process and 1 GB/s between processes, assumptions",
        kind="cpu",
        dtype="float32",
    ),
)
NAMED = MappingProxyType({device.name: device for device in _ALL})


def device_of(name: str) -> Device:
    """A device by name.

    Raises:
        ValueError: for a name that is not in the table.
    """
    if name not in NAMED:
        raise ValueError(f"device={name!r} is not in the table; choose one of {', '.join(NAMED)}")
    return NAMED[name]
