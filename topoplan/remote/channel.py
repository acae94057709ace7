"""Sending into a channel that the other side may be closing.

paramiko looks whether a channel is open, lets go of its lock, and sends. If the other side closes it in between,
paramiko's reading thread confirms that, and what is sent after the confirmation is for a channel that sshd no longer
has: it ends the whole connection ("packet referred to nonexistent channel"), with every other channel on it. Here the
message goes out under the channel's lock, so that it is ahead of the confirmation or is not sent.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import paramiko
    from paramiko.message import Message

_KEYS_S = 0.1
"""How long to wait at a time while keys are exchanged anew, when nothing may be sent."""
_MOST_BYTES = 64
"""What a packet needs besides its data, by paramiko's own reckoning."""


def send(channel: paramiko.Channel, data: bytes, *, wait_s: float = 0.0) -> int:
    """Send the first part of `data`, as much as the other side takes in one packet; its length.

    0 means that it takes nothing now, also after `wait_s`.

    Raises:
        BrokenPipeError: the channel is closed, or was told that nothing more comes.
        EOFError: the connection is lost.
    """
    from paramiko.common import cMSG_CHANNEL_DATA

    with channel.lock:
        if not channel.closed and channel.out_window_size == 0 and wait_s > 0:
            channel.out_buffer_cv.wait(wait_s)
        if channel.closed or channel.eof_sent:
            raise BrokenPipeError
        size = min(len(data), channel.out_window_size, channel.out_max_packet_size - _MOST_BYTES)
        if size <= 0:
            return 0
        message = _message(cMSG_CHANNEL_DATA, channel)
        message.add_string(data[:size])
        if not _pass_on(channel, message):
            return 0
        channel.out_window_size -= size
        return size


def end(channel: paramiko.Channel) -> bool:
    """Say that nothing more comes. False if that cannot be said now, because keys are exchanged."""
    from paramiko.common import cMSG_CHANNEL_EOF

    with channel.lock:
        if not channel.closed and not channel.eof_sent:
            if not _pass_on(channel, _message(cMSG_CHANNEL_EOF, channel)):
                return False
            channel.eof_sent = True
        return True


def _message(kind: bytes, channel: paramiko.Channel) -> Message:
    from paramiko.message import Message

    message = Message()
    message.add_byte(kind)
    message.add_int(channel.remote_chanid)
    return message


def _pass_on(channel: paramiko.Channel, message: Message) -> bool:
    """What the transport does with a user's message, but for waiting: that thread may need the channel's lock."""
    transport = channel.transport
    if transport is None or not transport.is_active():
        raise EOFError
    if not transport.clear_to_send.is_set():
        return False
    with transport.clear_to_send_lock:
        if not transport.clear_to_send.is_set():
            return False
        transport._send_message(message)  # type: ignore[attr-defined]
    return True


class ChannelPipe:
    """A channel of a jump host, as what another connection runs over."""

    def __init__(self, channel: paramiko.Channel) -> None:
        """Take over `channel`."""
        self._channel = channel
        self._wait_s = _KEYS_S

    def recv(self, most: int) -> bytes:
        """As a socket's."""
        return self._channel.recv(most)

    def send(self, data: bytes) -> int:
        """As a socket's."""
        sent = send(self._channel, data, wait_s=self._wait_s)
        if sent == 0:
            transport = self._channel.transport
            if transport is not None:
                transport.clear_to_send.wait(_KEYS_S)
            raise TimeoutError
        return sent

    def settimeout(self, seconds: float | None) -> None:
        """As a socket's; without a limit, sending still gives up now and then with TimeoutError."""
        self._channel.settimeout(seconds)
        self._wait_s = _KEYS_S if seconds is None else seconds

    def shutdown(self, how: int) -> None:
        """Nothing; `close` says all that there is to say, in one go."""

    def close(self) -> None:
        """As a socket's."""
        self._channel.close()
