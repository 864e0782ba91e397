# SPDX-License-Identifier: Apache-2.0
"""`commopt chaos`: train on emulated nodes while one fault after the other strikes, and judge how each run ends.

A run is right, or every rank that is left has an error that names the fault; anything else is a failure.
"""
