# SPDX-License-Identifier: Apache-2.0
"""Engram: token ids to compressed ids (``token_map``), and n-grams of those to table rows (``hashing``)."""
