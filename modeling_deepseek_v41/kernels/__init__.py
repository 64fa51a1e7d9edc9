# SPDX-License-Identifier: Apache-2.0
"""Operations that have more than one implementation."""
