"""Checks that reject wrapped networks, networks with adapters of peft, and networks with inputs other than images."""

from __future__ import annotations

import torch
from torch import nn

from efficient_ft.core.errors import SettingError, UserError, hint
from efficient_ft.methods.declarations import Axis
from efficient_ft.models.view import assumed_size_note, default_image_size
from efficient_ft.models.view.inputs import other_inputs
from efficient_ft.models.view.probe import DataFlow
from efficient_ft.models.view.structure import embeddings_outside, image_tower

#: Remedy for averaged copies of a network.
_AVERAGED = "It is an averaged copy, which is not trained. Apply the methods to the network that is trained."
#: Remedy for networks whose parameters are sharded.
_FSDP = "Methods require unsharded parameters, but FSDP shards the parameters. Use DistributedDataParallel."
#: Remedies by name of the class that wraps or compiles a network. ``{inner}`` and ``{path}`` name the network inside.
_WRAPPERS = {
    "OptimizedModule": "Apply the methods to {inner}, and call torch.compile afterwards.",
    "DataParallel": "Apply the methods to {inner}, and wrap the network afterwards.",
    "DistributedDataParallel": "Apply the methods to {inner}, and wrap the network afterwards.",
    "FullyShardedDataParallel": _FSDP,
    "FSDPModule": _FSDP,
    "PeftModel": (
        "Apply the methods to {inner}. The adapters of peft remain in the network. In a callback, pass"
        " network='{path}', or network='NAME.{path}' if the PeftModel is the attribute NAME of the model."
    ),
    "AveragedModel": _AVERAGED,
    "ModelEma": _AVERAGED,
    "ModelEmaV2": _AVERAGED,
    "ModelEmaV3": _AVERAGED,
}
#: Names of the attributes in which wrappers store the network, in the order in which they are tried.
_INNER = ("_orig_mod", "base_model.model", "module")


#: Modules of torch that contain quantized layers, which have no trainable weights.
_QUANTIZED = ("torch.ao.nn.quantized", "torch.ao.nn.intrinsic.quantized", "torch.nn.quantized")

#: Remedy for a wrapped or compiled part of a network.
_PART = "Apply the methods before {name} is {done}."


def check_module(model: object) -> None:
    """Raise SettingError if `model` is not a module."""
    if not isinstance(model, nn.Module):
        raise SettingError("model", f"{model!r:.60}", "a torch.nn.Module", "Pass the model first.")


def refuse_wrapped(model: nn.Module) -> None:
    """Raise UserError if `model` or a part of it is compiled, scripted or wrapped (peft, DDP, FSDP, averaged copies).

    The message names the innermost network, to which the methods can be applied. If only a part of the network is
    wrapped, the message states that the methods must be applied first.
    """
    for name, module in model.named_modules():
        wrapper = _wrapper(module)
        if wrapper is not None:
            raise _not_plain(wrapper, name, _remedy(model, name))
        if type(module).__module__.startswith(_QUANTIZED):
            do = "Its weights cannot be trained. Apply the methods to the network before it is quantized."
            raise _not_plain(f"a quantized {type(module).__name__}", name, do)
        if isinstance(module, torch.jit.ScriptModule):
            raise _not_plain("ScriptModule", name, "Apply the methods before the network is scripted.")
        if getattr(module, "_compiled_call_impl", None) is not None:
            path = f"model.{name}" if name else "model"
            raise _not_plain(
                "a compiled network (model.compile())",
                name,
                f"Apply the methods first, and call {path}.compile() afterwards.",
            )


def _wrapper(module: nn.Module) -> str | None:
    """Return the name of the class in `_WRAPPERS` to which `module` belongs, or None for other modules."""
    return next((kind.__name__ for kind in type(module).__mro__ if kind.__name__ in _WRAPPERS), None)


def _remedy(model: nn.Module, name: str) -> str:
    """Return the remedy for the wrapper `name` in `model`. `name` is "" for the model itself."""
    module, path, remedies = model.get_submodule(name), f"model.{name}" if name else "model", []
    is_all = {id(p) for p in module.parameters()} == {id(p) for p in model.parameters()}
    while (wrapper := _wrapper(module)) is not None:
        remedies.append(_WRAPPERS[wrapper])
        part = next((part for part in _INNER if _has_module(module, part)), None)
        if part is None:
            path = "the network inside"
            break
        module, path = module.get_submodule(part), f"{path}.{part}"
    general = next((remedy for remedy in remedies if "{inner}" not in remedy), None)
    if general is not None:
        return general
    if not is_all:
        return _PART.format(name=name, done="compiled" if "torch.compile" in remedies[0] else "wrapped")
    if len(set(remedies)) > 1:
        return f"Apply the methods to {path}, and wrap and compile the network afterwards."
    return remedies[0].format(inner=path, path=path.removeprefix("model."))


def refuse_other_inputs(model: nn.Module) -> None:
    """Raise UserError if `model` takes texts or other inputs in addition to images, as CLIP does.

    The message names the image tower, to which the methods can be applied. Networks that use images alone are accepted,
    even if they contain embeddings outside of the image tower, for example learned queries.
    """
    tower = image_tower(model)
    required, optional = other_inputs(model)
    if tower is None or not (required or optional):
        return
    cause, more = None, ""
    if not required:
        try:
            flow = DataFlow(model, default_image_size(model))
        except UserError as error:
            cause = error
            if assumed_size_note(model):
                more = hint(" If it takes only images, pass their size, for example image_size=112.")
        else:
            if any(flow.uses(name) for name in embeddings_outside(model, tower)):
                return
    raise UserError(
        f"{type(model).__name__} takes other inputs in addition to images. Apply the methods to its image"
        f" tower, model.{tower}. In a callback, pass network='{tower}', or network='NAME.{tower}' if the network is the"
        f" attribute NAME of the model.{more}"
    ) from cause


def _has_module(module: nn.Module, name: str) -> bool:
    try:
        module.get_submodule(name)
    except AttributeError:
        return False
    return True


def _not_plain(wrapper: str, name: str, do: str) -> UserError:
    return UserError(f"The network must be an unwrapped nn.Module, got {wrapper}{f' at {name}' if name else ''}. {do}")


def refuse_adapters_of_peft(model: nn.Module, method: str, axes: tuple[Axis, ...]) -> None:
    """Raise UserError if `model` has adapters of peft and a method on `axes` would change the trained parameters."""
    if not {Axis.SELECTION, Axis.ADAPTERS} & set(axes):
        return
    if any(hasattr(module, "base_layer") and hasattr(module, "adapter_layer_names") for module in model.modules()):
        raise UserError(
            f"method {method}: the network has adapters of peft, which already determine the trained parameters. The"
            " method would freeze these adapters or train the adapted layers. Use a method that does not change which"
            " parameters are trained, or use the method lora instead of peft."
        )
