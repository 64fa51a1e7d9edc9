# SPDX-License-Identifier: Apache-2.0
"""Trains a tiny DeepSeek-V4.1 with its DSpark drafter on a text, on a CPU, and writes it in the release's format.

The text is the King James Bible, in the public domain, as Debian ships it, one verse a line:

    sudo apt-get install bible-kjv
    bible -f gen1:1-rev22:21 | cut -d' ' -f2- > kjv.txt

From the root of the repository, with the package installed:

    python -m examples.train_tiny kjv.txt --out my_checkpoint
    python -m examples.train_tiny.evaluate my_checkpoint/ckpt my_checkpoint/held_out.txt

Any other UTF-8 text of 200 KB or more will do. Read in this order: ``text.py`` (tokens and the held-out part), ``weights.py``
(every tensor by its checkpoint name), ``quantise.py`` (training sees the weights as they will be stored), ``streams.py``,
``attention.py``, ``experts.py``, ``backbone.py`` and ``drafter.py`` (the model of docs/model.md over whole sequences, in fp32,
differentiable, without state), ``optimiser.py``, ``training.py`` (the two loops), ``__main__.py``, ``evaluate.py``.
"""
