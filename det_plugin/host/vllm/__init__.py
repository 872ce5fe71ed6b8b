"""The only package that imports vLLM.

``plugin`` is what vLLM's entry points load; ``switch`` adds the flag; ``activation`` installs the operators in
a process whose engine asked for them; ``guards`` and ``audit`` refuse what is not proven; one module each for
what is replaced.
"""
