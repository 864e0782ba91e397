# SPDX-License-Identifier: Apache-2.0
"""`commopt doctor --measure`: links measured beside what they should be, and a verdict with remedies.

measure and script take figures (on every rank), judge turns them into a verdict (a pure function), show prints it.
"""
