"""Published bugs of distributed training, each as a wrong and a right program.

`README.md` is the map.
"""
