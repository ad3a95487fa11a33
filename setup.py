"""Packaging of dsdoctor. Everything that diagnoses works with the base install; torch and DeepSpeed are extras."""

from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent
VERSION = next(
    line.split('"')[1]
    for line in (HERE / "dsdoctor" / "__init__.py").read_text(encoding="utf-8").splitlines()
    if line.startswith("__version__")
)
BUILD = ["torch", "pip", "setuptools>=68", "wheel", "ninja>=1.13", "build"]
TEST = [
    "torch",
    "pip",
    "setuptools>=68",
    "wheel",
    "ninja>=1.13",
    "pytest>=8",
    "hypothesis",
    "ruff>=0.14",
    "mypy>=1.18",
]

setup(
    name="dsdoctor",
    version=VERSION,
    description="Gets DeepSpeed built and keeps it running right",
    long_description=(HERE / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.10",
    packages=find_packages(include=["dsdoctor", "dsdoctor.*"]),
    package_data={"dsdoctor": ["py.typed"]},
    install_requires=[
        "packaging>=23",
        "msgspec>=0.19",
        "typer>=0.15",
        "rich>=13",
        "nvidia-ml-py>=12",
        "pyelftools>=0.31",
        "filelock>=3.12",
        "platformdirs>=4",
    ],
    extras_require={"build": BUILD, "test": TEST},
    entry_points={"console_scripts": ["dsdoctor=dsdoctor.cli:main"]},
    classifiers=[
        "Environment :: Console",
        "Intended Audience :: Developers",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
)
