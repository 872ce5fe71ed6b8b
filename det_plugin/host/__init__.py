"""Hosts: serving engines that det_plugin plugs into."""
