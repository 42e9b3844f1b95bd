"""Build the compiled parts of mlora-ext with CMake and Ninja.

`CMakeLists.txt` is the only list of sources, flags and architectures; this file names none of them. It tells
CMake where this interpreter, torch and pybind11 are, and where setuptools wants the libraries.
Options for CMake go through the variable `CMAKE_ARGS`, e.g. `CMAKE_ARGS="-DMLORA_WITH_CUDA=OFF"`.
"""

import os
import shlex
import subprocess
import sys
from pathlib import Path

from setuptools import Extension, find_packages, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).parent.resolve()


class CMakeBuild(build_ext):
    """Configure and build everything that `CMakeLists.txt` lists into the package folder `mlora_ext`."""

    def run(self) -> None:
        try:
            import pybind11
            from torch.utils import cpp_extension
        except ImportError as error:
            raise SystemExit(
                f"building mlora-ext needs {error.name} in this environment: install torch first "
                "(CPU: pip install torch==2.13.0), then\n"
                "  pip install 'setuptools>=77' wheel cmake ninja pybind11\n"
                "  pip install --no-build-isolation ."
            ) from None

        package_dir = Path(self.get_ext_fullpath("mlora_ext._C")).parent.resolve()
        build_dir = (ROOT / self.build_temp).resolve()
        build_dir.mkdir(parents=True, exist_ok=True)
        configure = [
            "cmake",
            f"-S{ROOT}",
            f"-B{build_dir}",
            "-GNinja",
            f"-DCMAKE_BUILD_TYPE={'Debug' if self.debug else 'Release'}",
            f"-DCMAKE_LIBRARY_OUTPUT_DIRECTORY={package_dir}",
            f"-DPython_EXECUTABLE={sys.executable}",
            f"-Dpybind11_DIR={pybind11.get_cmake_dir()}",
            f"-DMLORA_VERSION={self.distribution.get_version()}",
            f"-DMLORA_TORCH_INCLUDE_DIRS={';'.join(cpp_extension.include_paths())}",
            f"-DMLORA_TORCH_LIBRARY_DIRS={';'.join(cpp_extension.library_paths())}",
            *shlex.split(os.environ.get("CMAKE_ARGS", "")),
        ]
        # cmake and ninja of this environment come first, also when it is not activated
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
        env = {**os.environ, "PATH": path}
        subprocess.run(configure, check=True, env=env)
        subprocess.run(["cmake", "--build", str(build_dir)], check=True, env=env)


setup(
    # the examples go into the package as data, for `mlora examples`
    packages=[
        *find_packages(include=["mlora_ext", "mlora_ext.*"]),
        *find_packages("python"),
        "mlora.examples",
    ],
    ext_modules=[Extension("mlora_ext._C", sources=[])],
    cmdclass={"build_ext": CMakeBuild},
)
