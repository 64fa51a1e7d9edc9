# SPDX-License-Identifier: Apache-2.0
"""DSpark: a drafter that proposes a block of tokens from the backbone's own streams, and what verifies and accepts them."""
