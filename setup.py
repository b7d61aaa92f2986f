"""The native kernels, built at install where there is a compiler. Without them torch's own do the work."""

from pathlib import Path

from setuptools import Extension, setup

NATIVE = Path("src/gpu/fast/native")

setup(
    ext_modules=[
        Extension(
            "regrow.gpu.fast._native",
            sorted(map(str, NATIVE.glob("*.cpp"))),
            depends=sorted(map(str, NATIVE.glob("*.h"))),
            # OpenMP is compiled for but not linked: its symbols are those of the torch in the process.
            extra_compile_args=[
                *("-O3", "-std=c++17", "-march=native", "-ffp-contract=off"),
                *("-fopenmp", "-fvisibility=hidden", "-Wno-maybe-uninitialized", "-Wno-uninitialized"),
            ],
            optional=True,
        )
    ]
)
