# SPDX-License-Identifier: Apache-2.0
"""What a build holds, with and without a CUDA compiler; nothing is downloaded."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
from email import message_from_bytes
from email.message import Message
from importlib.util import find_spec
from pathlib import Path
from shutil import which
from zipfile import ZipFile

import pytest

from commopt.version import __version__

ROOT = Path(__file__).parent.parent
BUILD_TOOLS = ("cmake", "ninja")

missing = [name for name in ("scikit_build_core", "pybind11", "pip") if find_spec(name) is None]
missing += [name for name in BUILD_TOOLS if which(name) is None]
pytestmark = pytest.mark.skipif(bool(missing), reason=f"needs {', '.join(missing)}")


def build_wheel(folder: Path, path: str, source: Path = ROOT, **variables: str) -> subprocess.CompletedProcess[str]:
    """Build `source` into `folder` with the programs of `path` and no other."""
    kept = {name: os.environ[name] for name in ("HOME", "TMPDIR", "LD_LIBRARY_PATH") if name in os.environ}
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-index", "--no-build-isolation"]
    return subprocess.run(
        [*command, "--disable-pip-version-check", "-w", str(folder), str(source)],
        env={**kept, "PATH": path, **variables},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )


@pytest.fixture(scope="module")
def bare_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A PATH without nvcc and without any C++ compiler."""
    folder = tmp_path_factory.mktemp("bare")
    for tool in BUILD_TOOLS:
        found = which(tool)
        assert found
        (folder / tool).symlink_to(found)
    return str(folder)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory, bare_path: str) -> ZipFile:
    """A wheel built without any compiler."""
    folder = tmp_path_factory.mktemp("wheel")
    done = build_wheel(folder, bare_path)
    assert done.returncode == 0, done.stdout + done.stderr
    (built,) = folder.glob("*.whl")
    return ZipFile(built)


@pytest.fixture(scope="module")
def metadata(wheel: ZipFile) -> Message:
    return message_from_bytes(wheel.read(f"commopt-{__version__}.dist-info/METADATA"))


def test_wheel_holds_both_packages_and_the_kernel_sources(wheel: ZipFile) -> None:
    names = set(wheel.namelist())
    for package in ("commopt", "topology"):
        python = {str(path.relative_to(ROOT)) for path in (ROOT / package).rglob("*.py")}
        assert python
        assert python | {f"{package}/py.typed"} <= names
    for source in [*(ROOT / "csrc").glob("*.cuh"), *(ROOT / "csrc" / "cpu").iterdir()]:
        assert wheel.read(f"commopt/{source.relative_to(ROOT)}") == source.read_bytes()
    assert f"commopt-{__version__}.dist-info/licenses/LICENSE" in names


def test_the_command_is_installed(wheel: ZipFile) -> None:
    (name,) = (name for name in wheel.namelist() if name.endswith("entry_points.txt"))
    assert "commopt=commopt.__main__:main" in wheel.read(name).decode().replace(" ", "")


def test_wheel_holds_nothing_else(wheel: ZipFile) -> None:
    roots = {name.split("/")[0] for name in wheel.namelist()}
    assert roots == {"commopt", "topology", f"commopt-{__version__}.dist-info"}
    assert not [name for name in wheel.namelist() if name.endswith((".so", ".cu"))]


def test_a_source_distribution_builds_the_same_wheel(wheel: ZipFile, tmp_path: Path, bare_path: str) -> None:
    program = "import sys; from scikit_build_core.build import build_sdist; build_sdist(sys.argv[1])"
    subprocess.run([sys.executable, "-c", program, str(tmp_path)], cwd=ROOT, check=True, capture_output=True)
    (source,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(source) as archive:
        files = {name.partition("/")[2] for name in archive.getnames()}
    assert {"LICENSE", "CITATION.cff", "constraints.txt", "tests/conftest.py", "csrc/module.cu"} <= files
    assert not [name for name in files if name.startswith((".ci", "build", ".venv"))]
    done = build_wheel(tmp_path, bare_path, source)
    assert done.returncode == 0, done.stdout + done.stderr
    (built,) = tmp_path.glob("*.whl")
    assert sorted(ZipFile(built).namelist()) == sorted(wheel.namelist())


def test_metadata(metadata: Message) -> None:
    assert metadata["Version"] == __version__
    assert metadata["Requires-Python"] == ">=3.10"
    requirements = metadata.get_all("Requires-Dist", [])
    assert {line for line in requirements if "extra" not in line} == {"torch>=2.7", "numpy>=1.24"}
    extras = {
        "cuda12",
        "cuda13",
        "patches",
        "plot",
        "cli",
        "nvml",
        "integrations",
        "engines",
        "docs",
        "demo",
        "test",
        "dev",
    }
    assert set(metadata.get_all("Provides-Extra", [])) == extras


def test_constraints_pin_what_the_project_asks_for(metadata: Message) -> None:
    pinned = {
        line.split("==")[0].lower().replace("_", "-")
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if "==" in line
    }
    requirements = [line for line in metadata.get_all("Requires-Dist", []) if "cuda" not in line]
    asked = {re.split(r"[^\w.-]", line)[0].lower() for line in requirements} - {"commopt"}
    assert asked <= pinned, f"constraints.txt lacks {sorted(asked - pinned)}"


def test_required_cuda_fails_without_nvcc(tmp_path: Path, bare_path: str) -> None:
    done = build_wheel(tmp_path, bare_path, COMMOPT_REQUIRE_CUDA="ON")
    assert done.returncode != 0
    text = " ".join((done.stdout + done.stderr).split())
    assert "no working nvcc was found (COMMOPT_CUDA is ON); put nvcc and a C++ compiler on PATH" in text


@pytest.mark.skipif(which("c++") is None, reason="needs a C++ compiler")
@pytest.mark.parametrize("wanted", ["ON", "OFF"])
def test_a_compiler_makes_kernels_for_cpus_where_they_are_wanted(tmp_path: Path, wanted: str) -> None:
    done = build_wheel(tmp_path, os.environ["PATH"], COMMOPT_CUDA="OFF", COMMOPT_CPU=wanted)
    assert done.returncode == 0, done.stdout + done.stderr
    (built,) = tmp_path.glob("*.whl")
    compiled = [name for name in ZipFile(built).namelist() if name.endswith(".so")]
    assert [name.split(".")[0] for name in compiled] == ["commopt/_cpu"] * (wanted == "ON")


@pytest.mark.slow
@pytest.mark.skipif(which("nvcc") is None, reason="needs nvcc")
def test_architectures(tmp_path: Path) -> None:
    """Machine code for every supported architecture, and PTX of the newest for those to come."""
    import pybind11

    defined = {
        "SKBUILD_PROJECT_NAME": "commopt",
        "SKBUILD_PROJECT_VERSION": __version__,
        "COMMOPT_REQUIRE_CUDA": "ON",
        "Python_EXECUTABLE": sys.executable,
        "pybind11_DIR": pybind11.get_cmake_dir(),
    }
    command = ["cmake", "-G", "Ninja", "-S", str(ROOT), "-B", str(tmp_path)]
    command += [f"-D{name}={value}" for name, value in defined.items()]
    environment = {name: value for name, value in os.environ.items() if name != "CUDAARCHS"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    codes = set(re.findall(r"code=\[([\w,]+)\]", (tmp_path / "build.ninja").read_text()))
    version = re.search(r"CUDA compiler identification is NVIDIA (\d+)\.(\d+)", done.stdout)
    assert version
    if (int(version[1]), int(version[2])) >= (12, 8):
        assert codes == {"sm_80", "sm_90", "compute_100,sm_100"}
    else:
        assert codes == {"sm_80", "compute_90,sm_90"}
