# SPDX-License-Identifier: Apache-2.0
"""Scripts that use the package, and ``train_tiny``, a folder of them."""
