from loopback_device import device as device
from loopback_device import device_python as device_python
from loopback_device import sshd as sshd
