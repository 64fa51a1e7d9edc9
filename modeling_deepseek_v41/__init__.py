# SPDX-License-Identifier: Apache-2.0
"""DeepSeek-V4.1-Flash, with its DSpark drafter, for AWS Trainium2 and for reading and running on a CPU."""
