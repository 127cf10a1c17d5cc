//! Opens a VHDX image: its headers, its metadata, its block table.
//!
//! Invariant: all of an image is in one file.

use std::ffi::OsStr;
use std::path::Path;
use std::sync::Arc;

use serde_json::{Map, json};

use crate::error::ImageError;
use crate::formats::driver::{Fact, ImageInfo, OpenTerms, Opened};
use crate::formats::format::Format;
use crate::formats::mapped_content::MappedContent;
use crate::formats::table_blocks::TableBlocks;
use crate::formats::vhdx::block_table::BlockTable;
use crate::formats::vhdx::region_table::{MAGIC, Regions};
use crate::formats::vhdx::vhdx_metadata::{MAX_BYTES, Sizes};
use crate::image_file::ImageFile;

fn read(file: &ImageFile) -> Result<(Regions, Sizes), ImageError> {
    let failed = |error: std::io::Error| ImageError::os(file.path(), "read", &error);
    let refused = |why: String| ImageError::refused(file.path(), why);
    let mut first = [0; MAGIC.len()];
    file.read_at(0, &mut first).map_err(failed)?;
    if first != MAGIC {
        return Err(refused("its header is damaged: its first bytes".into()));
    }
    let regions = Regions::read(file).map_err(failed)?.map_err(refused)?;
    let mut metadata = vec![0; regions.metadata.len.min(MAX_BYTES) as usize];
    file.read_at(regions.metadata.pos, &mut metadata).map_err(failed)?;
    let sizes = Sizes::parse(&metadata).map_err(refused)?;
    Ok((regions, sizes))
}

pub(super) fn open(file: &Arc<ImageFile>, _: &mut OpenTerms<'_>) -> Result<Opened, ImageError> {
    let (regions, sizes) = read(file)?;
    let end = file.size().map_err(|e| ImageError::os(file.path(), "find its size", &e))?;
    let blocks = TableBlocks::new(file.clone());
    let table = BlockTable::new(sizes, regions.block_table, blocks, end);
    let table = table.map_err(|why| ImageError::refused(file.path(), why))?;
    let content = Box::new(MappedContent { table: Arc::new(table), unit: sizes.block });
    Ok(Opened { content, size: sizes.disk, data: vec![file.clone()], marked_corrupt: false })
}

pub(super) fn info(
    file: &ImageFile,
    _: &Path,
    _: Option<&OsStr>,
) -> Result<Option<ImageInfo>, ImageError> {
    let (_, sizes) = read(file)?;
    let mut json = Map::new();
    json.insert("virtual-size".into(), json!(sizes.disk));
    json.insert("cluster-size".into(), json!(sizes.block));
    Ok(Some(ImageInfo {
        format: Format::Vhdx,
        title: "vhdx, version 1".into(),
        size: sizes.disk,
        json,
        lines: vec![
            ("block size", Fact::Bytes(sizes.block)),
            ("sector size", Fact::Bytes(sizes.sector)),
        ],
        note: Some("it is only read".into()),
    }))
}
