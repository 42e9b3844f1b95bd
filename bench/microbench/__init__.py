"""The sections of `suite.py`: operators, layers and steps beside their peers, on a CPU or a GPU."""
