"""Write networks as ONNX files or as exported PyTorch programs (PT2), and run these files."""

from __future__ import annotations

import importlib.util
import json
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from efficient_ft.core.errors import UserError, first_line
from efficient_ft.task import Inputs, Task
from efficient_ft.task.base import tensors_of

#: Name of the file inside a PT2 archive that contains the metadata.
METADATA = "efficient_ft.json"
#: Name of the only input of an image network. The names correspond to those of `transformers`.
IMAGES = "pixel_values"
#: ONNX files with more bytes of weights store the weights in a second file, because a protocol buffer is limited to
#: 2 GiB.
_LARGEST = 1_900_000_000


def input_names(inputs: Inputs) -> list[str]:
    """Return the names of the inputs of the exported network."""
    return list(inputs) if isinstance(inputs, Mapping) else [IMAGES]


class ExportedNetwork(nn.Module):
    """An exported file as a module.

    Args:
        run: function that computes the logits from the list of input tensors on the CPU.
        names: names of the inputs, in the order in which `run` takes them.
        batch: batch size with which the network was exported, or None for any batch size. Smaller batches are padded.
    """

    def __init__(self, run: Callable[[list[Tensor]], Tensor], names: Sequence[str], batch: int | None) -> None:
        super().__init__()
        self._run, self._names, self._batch = run, list(names), batch
        # Functions for prediction move inputs to the device of the parameters.
        self.on_cpu = nn.Parameter(torch.empty(0), requires_grad=False)

    def forward(self, *tensors: Tensor, **named: Tensor) -> Tensor:
        parts = [x.cpu() for x in (tensors or [named[name] for name in self._names])]
        size = self._batch
        if size is None:
            return self._run(parts)
        found = []
        for start in range(0, len(parts[0]), size):
            chunk = [x[start : start + size] for x in parts]
            count = len(chunk[0])
            padded = [torch.cat([x, x[-1:].expand(size - count, *x.shape[1:])]) for x in chunk]
            found.append(self._run(padded)[:count])
        return torch.cat(found)


class _Logits(nn.Module):
    """A network that takes tensors by position and returns its logits as a tensor."""

    def __init__(self, task: Task, model: nn.Module, names: Sequence[str] | None) -> None:
        super().__init__()
        self.task, self.model, self.names = task, model, names

    def forward(self, *tensors: Tensor) -> Tensor:
        inputs = tensors[0] if self.names is None else dict(zip(self.names, tensors, strict=True))
        return self.task.logits(self.model, inputs)


class _Graph(NamedTuple):
    """A network to export, with example inputs, the dynamic dimensions of its inputs, and their names."""

    module: nn.Module
    tensors: tuple[Tensor, ...]
    shapes: dict[str, Any]
    names: list[str]


class Format(ABC):
    """A file format for exported networks.

    Attributes:
        file: name of the file in the folder of the export.
        words: description of the program that runs the file.
        packages: packages that are required in addition to PyTorch.
    """

    file: ClassVar[str]
    words: ClassVar[str]
    packages: ClassVar[tuple[str, ...]] = ()

    def require_packages(self) -> None:
        """Raise UserError if a required package is not installed."""
        missing = [name for name in self.packages if importlib.util.find_spec(name) is None]
        if missing:
            raise UserError(
                f"{self.file} requires packages that are not installed: {', '.join(missing)}. Run"
                " pip install 'efficient-ft[export]'."
            )

    def write(
        self,
        task: Task,
        model: nn.Module,
        example: Inputs,
        longest: int | None,
        batch: int | None,
        metadata: Mapping[str, str],
        folder: Path,
    ) -> None:
        """Write a network in evaluation mode on the CPU to the file `self.file` in `folder`.

        Args:
            task: task that computes the logits.
            model: network, whose parameters do not require gradients.
            example: batch of at least two samples, or of `batch` samples.
            longest: maximum length of sequences (dimension 1 of each input), or None if only the batch is dynamic.
            batch: fixed batch size, or None for any batch size.
            metadata: texts that are stored in the file.
            folder: existing folder.

        Raises:
            UserError: If the network or one of its methods cannot be exported.
        """
        tensors, names = tuple(tensors_of(example)), input_names(example)
        dims: dict[int, Any] = {} if batch is not None else {0: torch.export.Dim("batch")}
        if longest is not None:
            dims[1] = torch.export.Dim("length", max=longest)
        shapes = {"tensors": tuple(dict(dims) for _ in tensors)}
        wrapped = _Logits(task, model, names if isinstance(example, Mapping) else None).eval()
        try:
            with warnings.catch_warnings(), torch.no_grad():
                warnings.simplefilter("ignore")
                self._write(_Graph(wrapped, tensors, shapes, names), metadata, folder)
        except Exception as error:  # the exporters of torch raise errors of many classes
            raise self._refused(error, batch) from error

    def _refused(self, error: Exception, batch: int | None) -> UserError:
        """Return the error for a network that cannot be exported, with the innermost reason."""
        chain: list[BaseException] = list(_chain(error))
        if (own := next((one for one in chain if isinstance(one, UserError)), None)) is not None:
            return UserError(f"The run cannot be exported as {self.file}. {own}")
        reason = first_line(chain[-1]).rstrip(".")
        fixed = "" if batch is not None else " If the reason is the batch size, export with a fixed size: --batch 1."
        return UserError(
            f"The network cannot be exported as {self.file}, because torch cannot express it as a graph: {reason}."
            f"{fixed} To use the network in PyTorch, load model.safetensors of the run."
        )

    @abstractmethod
    def _write(self, graph: _Graph, metadata: Mapping[str, str], folder: Path) -> None: ...

    @abstractmethod
    def open(self, file: Path) -> tuple[ExportedNetwork, dict[str, str]]:
        """Load a file that `write` wrote, and return the network and the metadata.

        Raises:
            UserError: If the file cannot be loaded.
        """


def _chain(error: BaseException) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__  # type: ignore[assignment]


class _Onnx(Format):
    file, words, packages = "model.onnx", "onnxruntime", ("onnx", "onnxscript", "onnxruntime")

    def _write(self, graph: _Graph, metadata: Mapping[str, str], folder: Path) -> None:
        program = torch.onnx.export(
            graph.module, graph.tensors, dynamo=True, dynamic_shapes=graph.shapes, input_names=graph.names,
            output_names=["logits"], verbose=False,
        )  # fmt: skip
        assert program is not None, "torch.onnx.export returns a program with dynamo=True"
        program.model.metadata_props.update(metadata)
        size = sum(x.nbytes for x in graph.module.state_dict().values())
        program.save(str(folder / self.file), external_data=size > _LARGEST)

    def open(self, file: Path) -> tuple[ExportedNetwork, dict[str, str]]:
        if importlib.util.find_spec("onnxruntime") is None:
            raise UserError(
                f"{file}: ONNX files require the package onnxruntime, which is not installed. Run"
                " pip install 'efficient-ft[export]', or pass model.safetensors of the export."
            )
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads, options.log_severity_level = torch.get_num_threads(), 3
        try:
            session = onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])
        except Exception as error:  # onnxruntime raises errors of many classes
            raise UserError(f"The file {file} cannot be loaded by onnxruntime ({first_line(error)}).") from error
        inputs, output = session.get_inputs(), session.get_outputs()[0].name
        names = [one.name for one in inputs]

        def run(tensors: list[Tensor]) -> Tensor:
            given = {name: x.contiguous().numpy() for name, x in zip(names, tensors, strict=True)}
            return torch.from_numpy(session.run([output], given)[0])

        shape = inputs[0].shape
        batch = shape[0] if shape and isinstance(shape[0], int) else None
        return ExportedNetwork(run, names, batch), dict(session.get_modelmeta().custom_metadata_map)


class _Pt2(Format):
    file, words = "model.pt2", "torch.export.load"

    def _write(self, graph: _Graph, metadata: Mapping[str, str], folder: Path) -> None:
        program = torch.export.export(graph.module, graph.tensors, dynamic_shapes=graph.shapes)
        program.example_inputs = None  # the example would only enlarge the file
        torch.export.save(program, folder / self.file, extra_files={METADATA: json.dumps(dict(metadata))})

    def open(self, file: Path) -> tuple[ExportedNetwork, dict[str, str]]:
        """Load a file that this process wrote. Loading a file from another person can run code from the file."""
        extra = {METADATA: ""}
        program = torch.export.load(file, extra_files=extra)
        metadata: dict[str, str] = json.loads(extra[METADATA])
        module, batch = program.module(), json.loads(metadata["batch"])
        return ExportedNetwork(lambda tensors: module(*tensors), json.loads(metadata["inputs"]), batch), metadata


#: The file formats, by the value of ``--to``.
FORMATS: dict[str, Format] = {"onnx": _Onnx(), "pt2": _Pt2()}
