"""Images for training: published data sets, a user's own folders, and the loaders that read them.

>>> data = open_data(config.data, InputSpec((32, 32), (0.5,) * 3, (0.5,) * 3), seed=0)
>>> for images, labels in data.train_loader(): ...

A corrupt image stops the run with its path when it is first read (`data.on_corrupt=stop`): finding all of
them up front would cost a full decode of the data set at every start. `data.on_corrupt=skip` pays that: it
decodes every image once, leaves the bad ones out of their split before anything is counted or shuffled,
and reports them, so that the run is the same whenever and however the images are read.
"""

from efficient_ft.data.images import Transform, read_image
from efficient_ft.data.loading import CounterSampler, ImageData, class_count, missing_data, open_data
from efficient_ft.data.round_robin import TasksData

__all__ = [
    "CounterSampler",
    "ImageData",
    "TasksData",
    "Transform",
    "class_count",
    "missing_data",
    "open_data",
    "read_image",
]
