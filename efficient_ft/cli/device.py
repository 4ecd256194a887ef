"""Check of the option ``--device``, which several commands share."""

from __future__ import annotations

from efficient_ft.core.errors import SettingError


def require_device(name: str) -> None:
    """Raise a `SettingError` if ``--device`` is not a CPU, a CUDA device or the accelerator of this machine."""
    import torch

    accelerator = torch.accelerator.current_accelerator()
    other = None if accelerator is None or accelerator.type == "cuda" else accelerator.type
    allowed = "cpu, cuda or cuda:N" if other is None else f"cpu or {other}"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise SettingError("--device", name, allowed) from None
    if device.type not in ("cpu", "cuda", other):
        raise SettingError("--device", name, allowed)  # For example, the meta device stores no data.
    if device.type == "cuda" and not torch.cuda.is_available():
        machine = "cpu" if other is None else allowed
        raise SettingError("--device", name, f"{machine} on this machine", "There is no CUDA device.")
