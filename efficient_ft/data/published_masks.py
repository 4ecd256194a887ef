"""Published segmentation data sets, which must be downloaded by hand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from efficient_ft.config.schema import MaskConfig
from efficient_ft.core.errors import UserError, first_line
from efficient_ft.core.input_spec import IGNORED
from efficient_ft.core.text import printable
from efficient_ft.data.file_list import refuse_elsewhere
from efficient_ft.data.mask_folder import read_mask_folder
from efficient_ft.data.masks import Classes, MaskListing, MaskSamples

#: The eleven evaluated classes of CamVid (Brostow, Fauqueur, Cipolla, "Semantic object classes in video", 2009).
_CAMVID = (
    "sky", "building", "pole", "road", "pavement", "tree", "sign_symbol", "fence", "car", "pedestrian", "bicyclist",
)  # fmt: skip
_VOC = (
    "background", "aeroplane", "bicycle", "bird", "boat", "bottle", "bus", "car", "cat", "chair", "cow", "diningtable",
    "dog", "horse", "motorbike", "person", "pottedplant", "sheep", "sofa", "train", "tvmonitor",
)  # fmt: skip
#: The 19 evaluated classes of Cityscapes, by id in ``*_gtFine_labelIds.png``.
_CITYSCAPES = {
    7: "road", 8: "sidewalk", 11: "building", 12: "wall", 13: "fence", 17: "pole", 19: "traffic light",
    20: "traffic sign", 21: "vegetation", 22: "terrain", 23: "sky", 24: "person", 25: "rider", 26: "car", 27: "truck",
    28: "bus", 31: "train", 32: "motorcycle", 33: "bicycle",
}  # fmt: skip
_CITYSCAPES_IDS = 34


@dataclass(frozen=True)
class MaskSet:
    """A published segmentation data set."""

    title: str  # name in messages
    folder: str  # default folder below `data.root`
    classes: Classes  # classes of the masks
    contents: tuple[str, ...]  # required paths, relative to the folder
    read: Callable[[Path, bool], MaskListing]  # lists the splits, given the folder and ``data.follow_links``
    source: str  # origin of the files, for messages

    def root(self, root: Path) -> Path:
        """Return the folder of the data set, which is `root` or a folder below `root`."""
        inside = root / self.folder
        return inside if inside.is_dir() else root

    def missing(self, name: str, root: Path) -> str | None:
        """Return a message about missing files and their expected location, or None if all files exist."""
        folder = self.root(root)
        absent = [entry for entry in self.contents if not (folder / entry).exists()]
        if not absent:
            return None
        return (
            f"data={name} ({self.title}): {printable(folder.absolute())} has no {', '.join(absent)}.\n"
            f"Download it from {self.source} and set data.root to the folder with {', '.join(self.contents)}. For other"
            " layouts, use data=mask_folder."
        )


def _camvid(root: Path, follow_links: bool) -> MaskListing:
    names = None if (root / "classes.txt").is_file() else [*_CAMVID, "void"]
    return read_mask_folder(root, MaskConfig(classes=names), follow_links=follow_links)


def _voc(root: Path, follow_links: bool) -> MaskListing:
    lists = root / "ImageSets" / "Segmentation"
    train = next((lists / name for name in ("trainaug.txt", "train_aug.txt") if (lists / name).is_file()), None)
    if train is None:
        raise UserError(f"{printable(lists.absolute())} has no trainaug.txt, the list of the augmented training set.")
    parts = []
    for file in (train, lists / "val.txt"):
        stems = [Path(name).stem for name in _names(file)]  # some lists contain paths
        images = [root / "JPEGImages" / f"{stem}.jpg" for stem in stems]
        masks = [root / "SegmentationClassAug" / f"{stem}.png" for stem in stems]
        parts.append(_existing(images, masks, root, follow_links))
    return MaskListing(MASK_SETS["voc2012_aug"].classes, parts[0], None, parts[1], notes=_on_val("Pascal VOC 2012"))


def _names(file: Path) -> list[str]:
    again = "Restore this list from the data set."
    try:
        found = [line.split()[0] for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, ValueError) as error:
        raise UserError(f"{printable(file)} cannot be read ({first_line(error)}). {again}") from error
    if not found:
        raise UserError(f"{printable(file)} lists no image. {again}")
    return found


def _cityscapes(root: Path, follow_links: bool) -> MaskListing:
    parts = []
    for split in ("train", "val"):
        folder, labels = root / "leftImg8bit" / split, root / "gtFine" / split
        images = sorted(folder.glob("*/*_leftImg8bit.png"))
        if not images:
            raise UserError(f"{printable(folder.absolute())} has no CITY/*_leftImg8bit.png.")
        names = [one.relative_to(folder).as_posix().replace("_leftImg8bit", "_gtFine_labelIds") for one in images]
        parts.append(_existing(images, [labels / name for name in names], root, follow_links))
    return MaskListing(MASK_SETS["cityscapes"].classes, parts[0], None, parts[1], notes=_on_val("Cityscapes"))


def _existing(images: Sequence[Path], masks: Sequence[Path], root: Path, follow_links: bool) -> MaskSamples:
    for path in (*images, *masks):
        if not path.is_file():
            raise UserError(f"{printable(path)}: no such file. The copy of the data set is incomplete.")
    samples = MaskSamples(list(map(str, images)), list(map(str, masks)))
    refuse_elsewhere((*samples.images, *samples.masks), root, follow_links)
    return samples


def _on_val(title: str) -> list[str]:
    return [f"The {title} test labels are not public. As in the papers, the validation images are used for testing."]


_UNLABELED = frozenset({IGNORED, *(i for i in range(_CITYSCAPES_IDS) if i not in _CITYSCAPES)})
# fmt: off
MASK_SETS: dict[str, MaskSet] = {
    "camvid": MaskSet(
        "CamVid", "camvid", Classes(_CAMVID, tuple(range(len(_CAMVID))), frozenset({len(_CAMVID), IGNORED})),
        ("train/images", "train/masks"), _camvid,
        "http://mi.eng.cam.ac.uk/research/projects/VideoRec/CamVid/, as train, val and test with images/ and masks/",
    ),
    "voc2012_aug": MaskSet(
        "Pascal VOC 2012, augmented", "VOCdevkit/VOC2012", Classes(_VOC, tuple(range(len(_VOC)))),
        ("JPEGImages", "SegmentationClassAug", "ImageSets/Segmentation/val.txt"), _voc,
        "http://host.robots.ox.ac.uk/pascal/VOC/voc2012/ and http://home.bharathh.info/pubs/codes/SBD/download.html",
    ),
    "cityscapes": MaskSet(
        "Cityscapes", "cityscapes", Classes(tuple(_CITYSCAPES.values()), tuple(_CITYSCAPES), _UNLABELED),
        ("leftImg8bit/train", "gtFine/train", "leftImg8bit/val", "gtFine/val"), _cityscapes,
        "https://www.cityscapes-dataset.com (requires an account)",
    ),
}
# fmt: on
