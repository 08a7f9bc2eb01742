"""The metadata of the package; `pyproject.toml` holds the settings of the tools."""

import re
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).resolve().parent
PACKAGES = ("memory_saving_gradients", "mem_util")


def version() -> str:
    """Reads the version as text: importing the package would import TensorFlow."""
    text = (ROOT / "memory_saving_gradients" / "__init__.py").read_text("utf-8")
    found = re.search(r'^__version__ = "([^"]+)"$', text, re.MULTILINE)
    if found is None:
        raise RuntimeError('memory_saving_gradients/__init__.py has no __version__ = "')
    return found.group(1)


def long_description() -> str:
    """The README, where there is one (a source tree cut down for tests has none)."""
    readme = ROOT / "README.md"
    return readme.read_text("utf-8") if readme.exists() else ""


# TensorFlow is an extra, never a requirement: it comes under many names
# (tensorflow-cpu, tf-nightly, vendors' builds), and requiring one of them would put a
# second TensorFlow over the one that is there.
TENSORFLOW_RANGE = ">=2.16"
DEMO = ["scikit-learn>=1.2"]
OPTIMAL = ["scipy>=1.9"]
TEST = [
    "hypothesis>=6.80",
    "networkx>=3.0",
    "pytest>=7.4",
    "pytest-xdist>=3.5",
    *DEMO,
    *OPTIMAL,
]

setup(
    name="memory_saving_gradients",
    version=version(),
    description="Gradient checkpointing for TensorFlow by rewriting the graph",
    long_description=long_description(),
    long_description_content_type="text/markdown",
    author="memory_saving_gradients contributors",
    license="MIT",
    license_files=["LICENSE"],
    keywords="tensorflow gradient checkpointing rematerialization memory",
    classifiers=[
        "Intended Audience :: Developers",
        "Intended Audience :: Science/Research",
        "Programming Language :: Python :: 3",
        "Programming Language :: Python :: 3.10",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
    packages=find_packages(
        include=[pattern for name in PACKAGES for pattern in (name, f"{name}.*")]
    ),
    package_data={name: ["py.typed"] for name in PACKAGES},
    zip_safe=False,
    python_requires=">=3.10",
    install_requires=[
        "matplotlib>=3.7",
        "networkx>=3.0",
        "numpy>=1.23.5",
        "toposort>=1.7",
        "tqdm>=4.64",
    ],
    extras_require={
        "tensorflow": [f"tensorflow{TENSORFLOW_RANGE}"],
        "tensorflow-cpu": [f"tensorflow-cpu{TENSORFLOW_RANGE}"],
        "optimal": OPTIMAL,
        "demo": DEMO,
        "test": TEST,
        "dev": [*TEST, "mypy>=1.10", "ruff>=0.5"],
    },
)
