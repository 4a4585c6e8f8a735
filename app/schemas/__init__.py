"""Requests and answers in their JSON form."""
