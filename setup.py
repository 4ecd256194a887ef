"""Ship the configuration groups: conf/ of the checkout becomes efficient_ft/conf in the wheel. See pyproject.toml."""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py


class BuildWithConfiguration(build_py):
    def run(self) -> None:
        super().run()
        if not self.editable_mode:  # an editable installation reads conf/ of the checkout
            target = Path(self.build_lib, "efficient_ft", "conf")
            shutil.rmtree(target, ignore_errors=True)
            shutil.copytree(Path(__file__).parent / "conf", target)


setup(cmdclass={"build_py": BuildWithConfiguration})
