"""The sweeper of rows, where Hydra finds it: it makes plugins of this namespace only, and imports all of them."""

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.override_parser.types import Override


class RowsSweeper(BasicSweeper):
    """Hydra's own sweeper, run for each row of the experiment, if there is one."""

    def split_arguments(  # type: ignore[override]
        self, overrides: list[Override], max_batch_size: int | None
    ) -> list[list[list[str]]]:
        """Return the arguments of every job, in batches of at most `max_batch_size`."""
        from efficient_ft.cli.hydra.rows import jobs_of_rows

        assert self.config is not None
        (products,) = BasicSweeper.split_arguments(overrides, None)
        jobs = jobs_of_rows(products, self.config.get("rows"))
        return list(BasicSweeper.split_overrides_to_chunks(jobs, max_batch_size))
