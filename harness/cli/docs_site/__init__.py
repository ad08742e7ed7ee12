"""The documentation site's own code. mkdocs puts a hook's folder first on its path, so nothing else stands here.

docs_pages.py      documentation pages made from the code, for mkdocs
"""
