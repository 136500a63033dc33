"""Tools on services of the internet, or on servers of one's own that speak the same protocols.

Needs the extra ``online``.
"""

from opensearch_lightning.tools.online.chat_summary import ChatSummarizer
from opensearch_lightning.tools.online.lens import SerperLens
from opensearch_lightning.tools.online.paddlex import PaddleXLayoutParsing
from opensearch_lightning.tools.online.page_readers import DirectReader, JinaReader
from opensearch_lightning.tools.online.sentence_summary import SentenceSummarizer
from opensearch_lightning.tools.online.serper import Serper
from opensearch_lightning.tools.online.uploads import DirectoryUploader, HttpUploader, S3Uploader, Uploader
from opensearch_lightning.tools.online.web_protocol import PageReader, PageSummarizer, SearchEngine, WebHit, WebPage
from opensearch_lightning.tools.online.web_search import WebSearch

__all__ = [
    "ChatSummarizer",
    "DirectReader",
    "DirectoryUploader",
    "HttpUploader",
    "JinaReader",
    "PaddleXLayoutParsing",
    "PageReader",
    "PageSummarizer",
    "S3Uploader",
    "SearchEngine",
    "SentenceSummarizer",
    "Serper",
    "SerperLens",
    "Uploader",
    "WebHit",
    "WebPage",
    "WebSearch",
]
