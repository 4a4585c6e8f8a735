"""The only import name of Reprise. What lies beside this file are links to the folders at the top of the repository:
`reprise.cache` is the folder `cache/`. A wheel has the files themselves. App, engine and tools without torch all import
this file, so it stays empty.
"""
