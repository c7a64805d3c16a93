"""The claims of the five documents, what is measured for them, and the rules that judge them.

Nothing is imported here: the page is made from the record also where PyTorch is not installed.
"""
