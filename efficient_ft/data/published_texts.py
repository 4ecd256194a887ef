"""Published text data sets."""

from __future__ import annotations

from pathlib import Path

from efficient_ft.config.schema import TextConfig
from efficient_ft.core.errors import UserError
from efficient_ft.core.text import printable
from efficient_ft.data.counts import counted
from efficient_ft.data.fetch import Archive
from efficient_ft.data.published import PublishedSet
from efficient_ft.data.splits import Split
from efficient_ft.data.text_folders import SplitRows
from efficient_ft.data.text_places import origin
from efficient_ft.data.text_rows import read_rows
from efficient_ft.data.texts import TextListing, listing_of

#: File name and number of rows of each split of RTE.
_RTE: dict[Split, tuple[str, int]] = {"train": ("train.tsv", 2490), "test": ("dev.tsv", 277)}


def _read_rte(root: Path, settings: TextConfig) -> TextListing:
    """List RTE (Wang et al., "GLUE", ICLR 2019): does the first sentence entail the second?"""
    folder, found = root / "RTE", SplitRows()
    for split, (name, count) in _RTE.items():
        read = read_rows(folder / name, settings)
        if len(read.rows) != count:
            raise UserError(
                f"{printable((folder / name).absolute())} has {counted(len(read.rows), 'row')} instead of {count:,}."
                " Remove the folder and run the command again to download it."
            )
        found.rows[split], found.origins[split], found.columns = read.rows, f"{name} ({origin(read)})", read.columns
        found.notes += read.notes
    listing = listing_of(found, folder, settings)
    listing.notes.append(
        "The RTE test labels are not public. As in the papers, the validation texts are used for testing."
    )
    return listing


_ARCHIVE = Archive(
    "RTE.zip", "RTE", "https://dl.fbaipublicfiles.com/glue/data/RTE.zip", contents=("train.tsv", "dev.tsv")
)
TEXT_SETS: dict[str, PublishedSet] = {
    "rte": PublishedSet(
        "RTE (GLUE)",
        2,
        "RTE",
        (_ARCHIVE,),
        _read_rte,
        alternatives="Or use data=text_folder data.root=FILE (your own texts, .csv, .tsv or .jsonl).",
    ),
}
